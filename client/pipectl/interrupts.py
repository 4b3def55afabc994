"""Ctrl-C, SIGTERM and SIGHUP as one KeyboardInterrupt that can be held off while something must not be cut in half.

For commands that own processes: `pipectl demo`. Only the main thread may use it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """From construction on, the signals raise KeyboardInterrupt in the main thread, except while held off."""

    def __init__(self) -> None:
        self.has_come = False
        self._num_holds = 0
        for number in NUMBERS:
            signal.signal(number, self._take)

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Run a block that is not interrupted; what came meanwhile is raised after it."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
        if self.has_come and not self._num_holds:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Raise no more: the end has begun and goes through."""
        self._num_holds += 1

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True
        if not self._num_holds:
            raise KeyboardInterrupt
