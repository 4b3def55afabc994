from __future__ import annotations

import asyncio

import pytest

from piped.node.tasks import first_of


async def fail() -> None:
    raise ConnectionError("the peer left")


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


def test_the_first_failure_ends_the_others_and_the_loop_may_go_on() -> None:
    async def scene() -> int:
        rounds = 0
        while rounds < 3:
            with pytest.raises(ConnectionError):
                await first_of(one=wait_for_ever(), other=fail())
            rounds += 1
        assert len(asyncio.all_tasks()) == 1
        return rounds

    assert asyncio.run(scene()) == 3


@pytest.mark.parametrize("num_turns", range(6))
def test_a_cancellation_that_coincides_with_a_failure_still_ends_the_loop(num_turns: int) -> None:
    async def loop(began: asyncio.Event) -> None:
        while True:
            began.set()
            try:
                await first_of(one=wait_for_ever(), other=fail())
            except ConnectionError:
                await asyncio.sleep(0)

    async def scene() -> None:
        began = asyncio.Event()
        task = asyncio.create_task(loop(began))
        await began.wait()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done and task.cancelled()

    asyncio.run(scene())


def test_a_child_that_was_cancelled_from_elsewhere_does_not_cancel_the_owner() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    asyncio.run(first_of(one=wait_for_ever(), other=give_up()))
