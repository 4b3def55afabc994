"""Errors of ours as gRPC statuses: the interceptor that sends and measures them, and what a call may take at most.

A servicer raises PipedError; a client gets its code (`piped.errors` is the table), the text and the details (pipeapi.status).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import Message

from pipeapi import status
from piped import errors

UNARY_S = 30.0  # for any unary call, whatever the client allows
UPLOAD_S = 600.0  # for any call that sends a stream and gets one answer
MAX_STREAMS = 4000  # watches, logs and the like that are sent at once
log = structlog.get_logger("coordinator")
Call = Callable[[Any, Any], Awaitable[Any]]
Observe = Callable[[str, str, float], None]  # method, code, seconds


def code_of(error: errors.PipedError) -> grpc.StatusCode:
    """Return the status code of an error of ours."""
    return grpc.StatusCode[error.code]


def details_of(error: errors.PipedError) -> status.Details:
    """Return what programs can read of the error."""
    metadata: dict[str, str] = {}
    violations: tuple[tuple[str, str], ...] = ()
    if isinstance(error, errors.SpecError):
        violations = tuple((each.field, each.description) for each in error.violations)
    if isinstance(error, errors.ConflictError):
        metadata = {"job_id": error.holder, "hint": error.hint}
    return status.Details(error.reason, metadata, violations, error.retry_after_s)


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: errors.PipedError) -> NoReturn:
    """End the rpc with the error's code, text and details."""
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("rpc_bug", error=str(error))
    await context.abort(code, str(error), status.encode(code.value[0], str(error), details_of(error)))
    raise AssertionError("abort returned")


class Edge(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Turns errors of ours into status codes, limits every call but a node's streams, and measures every unary one."""

    def __init__(
        self,
        observe: Observe,
        *,
        limit_s: float = UNARY_S,
        upload_limit_s: float = UPLOAD_S,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self._observe, self._limit_s, self._upload_limit_s = observe, limit_s, upload_limit_s
        self._streams_left = max_streams

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method that the call is for."""
        found: Any = await continuation(handler_call_details)
        if found is None:
            return None  # gRPC answers UNIMPLEMENTED
        method = str(handler_call_details.method).rpartition("/")[2]
        codecs = (found.request_deserializer, found.response_serializer)
        if not found.request_streaming and not found.response_streaming:
            call = self._unary(method, _limited(method, found.unary_unary, self._limit_s))
            return grpc.unary_unary_rpc_method_handler(call, *codecs)
        if found.request_streaming and not found.response_streaming:
            call = self._unary(method, _limited(method, found.stream_unary, self._upload_limit_s))
            return grpc.stream_unary_rpc_method_handler(call, *codecs)
        if not found.request_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(found.unary_stream), *codecs)
        return grpc.stream_stream_rpc_method_handler(
            _session(found.stream_stream), found.request_deserializer, _serialized
        )

    def _unary(self, method: str, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            began_s, code = time.monotonic(), grpc.StatusCode.OK
            try:
                return await call(request, context)
            except errors.PipedError as error:
                code = code_of(error)
                await refuse(context, error)
            except BaseException:
                code = grpc.StatusCode.UNKNOWN
                raise
            finally:
                self._observe(method, code.name, time.monotonic() - began_s)

        return answer

    def _stream(self, call: Callable[[Any, Any], AsyncIterator[Any]]) -> Any:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            if self._streams_left <= 0:
                await refuse(context, errors.BusyError("no more streams at once are served; end one, or wait"))
            self._streams_left -= 1
            try:
                async for each in call(request, context):
                    yield each
            except errors.PipedError as error:
                await refuse(context, error)
            finally:
                self._streams_left += 1

        return answer


def _serialized(message: Message) -> bytes:
    """Serialize whatever message it is: some have a twin (SerializedSessionResponse)."""
    return message.SerializeToString()


def _limited(method: str, call: Call, limit_s: float) -> Call:
    async def answer(request: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await call(request, context)
        except TimeoutError:
            raise errors.TooSlowError(
                f"{method} took more than {limit_s:g} s: is its disk stuck, or the way to it slow? Ask again, under the "
                "same request id if it was a submission"
            ) from None

    return answer


def _session(call: Callable[[Any, Any], Awaitable[None]]) -> Any:
    async def answer(requests: Any, context: Any) -> None:
        try:
            await call(requests, context)
        except errors.PipedError as error:
            await refuse(context, error)

    return answer
