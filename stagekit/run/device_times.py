"""When actions ran on a CUDA device: the host only launches them, its own clock says nothing of them.

Two events around each compute action, made once. They are read at the end of a step, where the host waits for the
device anyway to know the loss; nothing else waits for them. Used by stagekit.run.executor.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

import torch

from stagekit.plan.actions import COMPUTE
from stagekit.run.stats import Recorder


class DeviceTimes:
    """Writes the device's start and end of each compute action into a recorder, on the host's clock."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begin = torch.cuda.Event(enable_timing=True)
        self._events = {
            index: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for index, action in enumerate(recorder.actions)
            if action.op in COMPUTE
        }

    def around(self, index: int, call: Callable[[], None]) -> Callable[[], None]:
        """Return the bound function of action `index` with an event before and after it."""
        if index not in self._events:
            return call
        before, after = self._events[index]

        def timed() -> None:
            before.record()
            call()
            after.record()

        return timed

    def begin(self) -> None:
        """Tie the device's clock to the host's: the device has nothing to do between two steps."""
        self._begin.record()
        self._begin_ns = monotonic_ns()

    def read(self) -> None:
        """Wait for the step's last action, and write all times. Only after a step in which each one ran."""
        starts, ends = self._recorder.start_ns, self._recorder.end_ns
        for index, (before, after) in self._events.items():
            after.synchronize()
            starts[index] = self._begin_ns + int(self._begin.elapsed_time(before) * 1e6)
            ends[index] = self._begin_ns + int(self._begin.elapsed_time(after) * 1e6)
