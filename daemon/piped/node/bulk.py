"""The Bulk stream: the coordinator asks for pieces of files, this node answers, on a channel of its own.

A log never delays a beat. Each ask waits in a task of its own until there is something to say or its time is up; the
number of asks under way is bounded. Built and run by piped.node.app.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc.aio import EOF  # type: ignore[attr-defined]

from pipeapi.v1 import jobs_pb2, nodes_pb2, nodes_pb2_grpc
from piped.node.logs import NoRecord, Record, read
from piped.node.tasks import first_of

log = structlog.get_logger()

_RETRY_S = 0.5
_POLL_S = 0.05
_WRITE_S = 60.0
_MAX_ASKS = 64
_MAX_WAIT_S = 60.0
_MAX_BYTES = 1 << 20
_RECORDS = {
    jobs_pb2.RECORD_KIND_LOG: Record.LOG,
    jobs_pb2.RECORD_KIND_TRACE: Record.TRACE,
    jobs_pb2.RECORD_KIND_STEPS: Record.STEPS,
    jobs_pb2.RECORD_KIND_PLAN: Record.PLAN,
}


class Bulk:
    """Keeps one Bulk stream open; `run` never returns."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str, attempts: Path) -> None:
        self._stub: Any = nodes_pb2_grpc.NodeServiceStub(channel)
        self._node_id = node_id
        self._attempts = attempts

    async def run(self) -> None:
        """Answer until cancelled; a broken stream is opened again."""
        while True:
            call = self._stub.Bulk()
            try:
                await first_of(bulk=self._hold(call))  # a task of its own: see there
            except* (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError) as group:
                log.debug("bulk_ended", reason=repr(group.exceptions[0]))
            finally:
                call.cancel()
            await asyncio.sleep(_RETRY_S)

    async def _hold(self, call: Any) -> None:
        await call.write(nodes_pb2.BulkRequest(hello=nodes_pb2.BulkHello(node_id=self._node_id)))
        gate, writing = asyncio.Semaphore(_MAX_ASKS), asyncio.Lock()

        async def answer(ask: nodes_pb2.BulkResponse) -> None:
            try:
                chunk = await self._chunk(ask)
            finally:
                gate.release()
            async with writing, asyncio.timeout(_WRITE_S):
                await call.write(nodes_pb2.BulkRequest(chunk=chunk))

        async with asyncio.TaskGroup() as group:
            while (ask := await call.read()) is not EOF:
                await gate.acquire()
                group.create_task(answer(ask), name=f"bulk-{ask.request_id}")

    async def _chunk(self, ask: nodes_pb2.BulkResponse) -> nodes_pb2.BulkChunk:
        record = _RECORDS.get(ask.kind)
        if record is None:
            return nodes_pb2.BulkChunk(request_id=ask.request_id, error=f"no record of kind {ask.kind}", eof=True)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(ask.wait_s, _MAX_WAIT_S)
        while True:
            try:
                piece = await asyncio.to_thread(
                    read,
                    self._attempts,
                    ask.fence,
                    ask.rank,
                    record,
                    offset=ask.offset,
                    tail_bytes=ask.tail_bytes,
                    max_bytes=min(ask.max_bytes or _MAX_BYTES, _MAX_BYTES),
                )
            except NoRecord as error:
                return nodes_pb2.BulkChunk(request_id=ask.request_id, error=str(error), eof=True)
            if piece.data or piece.is_last or loop.time() >= until_s:
                return nodes_pb2.BulkChunk(
                    request_id=ask.request_id, data=piece.data, next_offset=piece.next_offset, eof=piece.is_last
                )
            await asyncio.sleep(_POLL_S)
