"""The one table from error types to gRPC status codes, and the interceptor that applies and measures it.

A servicer raises PipedError; a client gets the code, the text and the details (pipeapi.status).
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

CODES: dict[type[errors.PipedError], grpc.StatusCode] = {  # the first row that fits the error's type counts
    errors.SpecError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.WrongStateError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConflictError: grpc.StatusCode.ALREADY_EXISTS,
    errors.TooLargeError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UserError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RegistrationRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseLost: grpc.StatusCode.ABORTED,
    errors.NodeError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TooSlowError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.BugError: grpc.StatusCode.INTERNAL,
}

UNARY_S = 30.0  # for any unary call, whatever the client allows
log = structlog.get_logger("coordinator")
Call = Callable[[Any, Any], Awaitable[Any]]
Observe = Callable[[str, str, float], None]  # method, code, seconds


def code_of(error: errors.PipedError) -> grpc.StatusCode:
    """Return the status code of an error of ours."""
    return next(code for kind, code in CODES.items() if isinstance(error, kind))


def details_of(error: errors.PipedError) -> status.Details:
    """Return what programs can read of the error."""
    if isinstance(error, errors.SpecError):
        return status.Details(error.reason, violations=tuple((v.field, v.description) for v in error.violations))
    if isinstance(error, errors.ConflictError):
        return status.Details(error.reason, {"job_id": error.holder, "hint": error.hint})
    return status.Details(error.reason)


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: errors.PipedError) -> NoReturn:
    """End the rpc with the error's code, text and details."""
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("rpc_bug", error=str(error))
    await context.abort(code, str(error), status.encode(code.value[0], str(error), details_of(error)))
    raise AssertionError("abort returned")


class Edge(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Turns errors of ours into status codes, and measures every unary call."""

    def __init__(self, observe: Observe, *, limit_s: float = UNARY_S) -> None:
        self._observe, self._limit_s = observe, limit_s

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
            return grpc.stream_unary_rpc_method_handler(self._unary(method, found.stream_unary), *codecs)
        if not found.request_streaming:
            return grpc.unary_stream_rpc_method_handler(_stream(found.unary_stream), *codecs)
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
                f"{method} took more than {limit_s:g} s: is the disk of the coordinator stuck? Ask again, under the "
                "same request id if it was a submission"
            ) from None

    return answer


def _stream(call: Callable[[Any, Any], AsyncIterator[Any]]) -> Any:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for each in call(request, context):
                yield each
        except errors.PipedError as error:
            await refuse(context, error)

    return answer


def _session(call: Callable[[Any, Any], Awaitable[None]]) -> Any:
    async def answer(requests: Any, context: Any) -> None:
        try:
            await call(requests, context)
        except errors.PipedError as error:
            await refuse(context, error)

    return answer
