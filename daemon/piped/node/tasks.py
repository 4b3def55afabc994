"""Running coroutines side by side until one ends; used by the loops that open streams again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(**work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, each as a task of that name, until one ends; cancel the others; raise what failed, the first one first.

    A task that ended as cancelled, though nobody here cancelled it, counts as ended: grpc does so to a read when a
    write of the same call is given up.

    Not a TaskGroup, because of Python 3.11: a child that fails in the moment of its owner's cancellation hides the
    cancellation, and a loop that handles the child's error then runs on for ever.
    """
    tasks = [asyncio.create_task(one, name=name) for name, one in work.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in (*done, *tasks):
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
