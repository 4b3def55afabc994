"""Ways to wait that streams need: for whatever ends first, for a reader, for the process to end, for several sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from piped.errors import PipedError, UnavailableError

T = TypeVar("T")
WRITE_DEADLINE_S = 10.0
QUEUE_LENGTH = 16  # items of all sources that wait for a slow reader


async def first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, cancel the others, and raise what the first one raised."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def write(context: Any, message: object) -> None:
    """Send one message on a node's stream. Raises UnavailableError when the node does not read it in time."""
    try:
        async with asyncio.timeout(WRITE_DEADLINE_S):
            await context.write(message)
    except TimeoutError:
        raise UnavailableError(f"the node read nothing for {WRITE_DEADLINE_S:.0f} s; reconnect") from None


class Closing:
    """Whether the coordinator is stopping: streams end before the server does."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def begin(self) -> None:
        """End every `race` with UnavailableError, now and later."""
        self._event.set()

    async def race(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result. Raises UnavailableError when the coordinator stops first."""
        task, stop = asyncio.create_task(coroutine), asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise UnavailableError("the coordinator is stopping; ask again")
        finally:
            task.cancel()
            stop.cancel()


async def merge(sources: Sequence[AsyncIterator[T]], closing: Closing) -> AsyncIterator[T]:
    """Yield from all sources as items come. One source's PipedError is raised after the others ended."""
    queue: asyncio.Queue[T | None] = asyncio.Queue(QUEUE_LENGTH)
    failures: list[PipedError] = []

    async def pump(source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                await queue.put(item)
        except PipedError as error:
            failures.append(error)
        await queue.put(None)

    tasks = [asyncio.create_task(pump(each)) for each in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await closing.race(queue.get())
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failures:
        raise failures[0]
