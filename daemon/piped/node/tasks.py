"""One thing that a TaskGroup of Python 3.11 gets wrong; used by the loops that open streams again and again."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if the running task was cancelled.

    A TaskGroup whose child fails in the moment of its owner's cancellation raises the child's error alone; a loop that
    handles the error would run on for ever (fixed in Python 3.13).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
