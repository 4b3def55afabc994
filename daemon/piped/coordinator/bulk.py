"""Questions to nodes about files of an attempt: logs, traces, steps, plans. One outstanding question per file.

The coordinator stores none of it. `services` asks; `sessions` hands over the streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from pipeapi.v1 import nodes_pb2
from piped.coordinator.tasks import first_of, write
from piped.errors import NotFoundError, PipedError, RegistrationRefused, UnavailableError

Stream = grpc.aio.ServicerContext[Any, Any]

MAX_BYTES = 256 * 1024  # per answer
HELLO_DEADLINE_S = 10.0
ANSWER_DEADLINE_S = 10.0  # on top of the time that the node was asked to wait
FOLLOW_WAIT_S = 10.0
LINK_S = 3.0  # a node's Bulk stream has a channel of its own: it may come so much later than the session
RETRY_S = 1.0  # between two looks for a node or a file that is not there yet


@dataclass(frozen=True, slots=True)
class FileName:
    """One file of one rank of an attempt. `kind` is the wire's name of a RecordKind."""

    node_id: str
    node_name: str
    fence: int
    rank: int
    kind: str


@dataclass(slots=True)
class _Link:
    node_id: str
    questions: asyncio.Queue[nodes_pb2.BulkResponse] = field(default_factory=asyncio.Queue)
    waiting: dict[int, asyncio.Future[nodes_pb2.BulkChunk]] = field(default_factory=dict)
    ending: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class BulkLinks:
    """The open Bulk streams, by node."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._last_request_id = 0
        self._arrival = asyncio.Event()  # set by the next stream, then replaced

    async def serve(self, context: Stream) -> None:
        """Carry questions and answers of one node until its stream ends or a newer one replaces it."""
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                first = await context.read()
        except TimeoutError:
            raise RegistrationRefused(f"no BulkHello within {HELLO_DEADLINE_S:.0f} s") from None
        if not isinstance(first, nodes_pb2.BulkRequest) or first.WhichOneof("message") != "hello":
            raise RegistrationRefused("the first message of a Bulk stream must be BulkHello")
        link = _Link(first.hello.node_id)
        self._end(link.node_id, UnavailableError("a newer Bulk stream of the node replaced this one"))
        self._links[link.node_id] = link
        self._arrival.set()
        self._arrival = asyncio.Event()
        try:
            await first_of(_receive(link, context), _send(link, context), _until(link.ending))
        finally:
            if self._links.get(link.node_id) is link:
                del self._links[link.node_id]
            _drop(link)

    def end_all(self, error: PipedError) -> None:
        """Close every stream with `error`."""
        for node_id in list(self._links):
            self._end(node_id, error)

    async def read(
        self, name: FileName, *, tail_bytes: int = 0, follow: bool = False, is_over: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[tuple[bytes, int]]:
        """Yield (bytes, next offset) up to the file's present end; with `follow`, until nothing more will come.

        `is_over` says that the attempt has ended: then what is absent stays absent. Raises UnavailableError when the
        node is not connected, NotFoundError when it has no such file; with `follow` both are waited out until
        `is_over`.
        """
        offset = 0
        while True:
            is_last_look = not follow or is_over()
            try:
                chunk = await self._ask(name, offset, tail_bytes, 0.0 if is_last_look else FOLLOW_WAIT_S)
                if chunk.error:
                    raise NotFoundError(f"rank {name.rank} on node {name.node_name}: {chunk.error}")
            except (UnavailableError, NotFoundError):
                if is_last_look:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            if chunk.data:
                yield chunk.data, chunk.next_offset
                tail_bytes = 0
            offset = max(offset, chunk.next_offset)
            if chunk.eof or (not chunk.data and is_last_look):
                return

    async def _ask(self, name: FileName, offset: int, tail_bytes: int, wait_s: float) -> nodes_pb2.BulkChunk:
        link = await self._link_of(name)
        self._last_request_id += 1
        question = nodes_pb2.BulkResponse(
            request_id=self._last_request_id,
            fence=name.fence,
            rank=name.rank,
            kind=name.kind,
            offset=offset,
            tail_bytes=tail_bytes,
            max_bytes=MAX_BYTES,
            wait_s=wait_s,
        )
        answer: asyncio.Future[nodes_pb2.BulkChunk] = asyncio.get_running_loop().create_future()
        link.waiting[question.request_id] = answer
        link.questions.put_nowait(question)
        try:
            async with asyncio.timeout(wait_s + ANSWER_DEADLINE_S):
                return await answer
        except TimeoutError:
            raise UnavailableError(f"node {name.node_name} did not answer for rank {name.rank} in time") from None
        finally:
            link.waiting.pop(question.request_id, None)

    async def _link_of(self, name: FileName) -> _Link:
        try:
            async with asyncio.timeout(LINK_S):
                while (link := self._links.get(name.node_id)) is None:
                    await self._arrival.wait()
                return link
        except TimeoutError:
            raise UnavailableError(
                f"node {name.node_name} is not connected, and the files of rank {name.rank} are there"
            ) from None

    def _end(self, node_id: str, error: PipedError) -> None:
        link = self._links.get(node_id)
        if link is not None and not link.ending.done():
            link.ending.set_exception(error)


async def _receive(link: _Link, context: Stream) -> None:
    while isinstance(message := await context.read(), nodes_pb2.BulkRequest):
        answer = link.waiting.get(message.chunk.request_id)
        if answer is not None and not answer.done():
            answer.set_result(message.chunk)


async def _send(link: _Link, context: Stream) -> None:
    while True:
        await write(context, await link.questions.get())


async def _until(ending: asyncio.Future[None]) -> None:
    await ending


def _drop(link: _Link) -> None:
    for answer in link.waiting.values():
        if not answer.done():
            answer.set_exception(UnavailableError(f"node {link.node_id} went away while it was asked"))
    if link.ending.done() and not link.ending.cancelled():
        link.ending.exception()  # retrieved, so that the loop does not report it
