"""Rich errors of an rpc: written by the coordinator, read by clients, as google.rpc.Status in trailing metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message

from pipeapi.v1 import errors_pb2

KEY = "grpc-status-details-bin"
DOMAIN = "piped"
_ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
_BAD_REQUEST = "type.googleapis.com/google.rpc.BadRequest"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"


@dataclass(frozen=True, slots=True)
class Details:
    """What went wrong, for programs. `violations` are (field, description) of a bad spec."""

    reason: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None  # None: asking again as it is won't help, or nothing is known


def encode(code: int, message: str, details: Details) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries `details`."""
    status = errors_pb2.Status(code=code, message=message)
    info = errors_pb2.ErrorInfo(reason=details.reason, domain=DOMAIN, metadata=details.metadata)
    status.details.append(_pack(_ERROR_INFO, info))
    if details.violations:
        bad = errors_pb2.BadRequest()
        for name, description in details.violations:
            bad.field_violations.add(field=name, description=description)
        status.details.append(_pack(_BAD_REQUEST, bad))
    if details.retry_after_s is not None:
        retry = errors_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(details.retry_after_s * 1e9))
        status.details.append(_pack(_RETRY_INFO, retry))
    return ((KEY, status.SerializeToString()),)


def decode(trailing_metadata: Iterable[tuple[str, str | bytes]] | None) -> Details | None:
    """Return the details of an rpc error's trailing metadata; None where there are none."""
    for key, value in trailing_metadata or ():
        if key != KEY or not isinstance(value, bytes):
            continue
        try:
            return _decode(errors_pb2.Status.FromString(value))
        except DecodeError:
            return None
    return None


def _decode(status: errors_pb2.Status) -> Details | None:
    reason, metadata = "", {}
    violations: tuple[tuple[str, str], ...] = ()
    retry_after_s = None
    for each in status.details:
        if each.type_url == _ERROR_INFO:
            info = errors_pb2.ErrorInfo.FromString(each.value)
            reason, metadata = info.reason, dict(info.metadata)
        elif each.type_url == _BAD_REQUEST:
            bad = errors_pb2.BadRequest.FromString(each.value)
            violations = tuple((one.field, one.description) for one in bad.field_violations)
        elif each.type_url == _RETRY_INFO:
            retry_after_s = errors_pb2.RetryInfo.FromString(each.value).retry_delay.ToNanoseconds() / 1e9
    return Details(reason, metadata, violations, retry_after_s) if reason else None


def _pack(type_url: str, message: Message) -> Any:
    return Any(type_url=type_url, value=message.SerializeToString())
