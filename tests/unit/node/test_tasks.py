from __future__ import annotations

import asyncio

import pytest
from piped.node.tasks import raise_if_cancelled


def test_a_cancellation_that_coincides_with_a_childs_failure_still_ends_the_loop() -> None:
    async def fail() -> None:
        raise ConnectionError("the peer left")

    async def loop_forever(began: asyncio.Event) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    began.set()
                    await asyncio.sleep(0)
                    group.create_task(fail())
                    await asyncio.Event().wait()
            except* ConnectionError:
                pass
            raise_if_cancelled()

    async def scene() -> None:
        began = asyncio.Event()
        task = asyncio.create_task(loop_forever(began))
        await began.wait()
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done, "the task runs on"
        with pytest.raises(asyncio.CancelledError):
            task.result()

    asyncio.run(scene())
