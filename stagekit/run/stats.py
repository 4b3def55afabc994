"""Timing: one slot per action of the frozen list, written in place; nothing is allocated while a step runs.

The executor writes, `Run` and the worker read after a step. Times are CLOCK_MONOTONIC nanoseconds of this host.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import monotonic_ns

from stagekit.plan.actions import Action

ActionHook = Callable[[int, int, int, str, int, int], None]  # rank, stage, chunk, op, t0_ns, t1_ns


class Recorder:
    """Start, end and wait of each action of one rank's list, for the step that ran last.

    `wait_ns[i]` is the time that compute action i waited for its inputs before `start_ns[i]`. `reduce` holds
    (stage, bucket, t0_ns, t1_ns) of the step's gradient reductions, from launch to completion as seen by this rank;
    `reduce_wait_ns` how long the rank was blocked in them, by stage.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = tuple(actions)
        zeros = [0] * len(self.actions)
        self.start_ns, self.end_ns, self.wait_ns = array("q", zeros), array("q", zeros), array("q", zeros)
        self.reduce: list[tuple[int, int, int, int]] = []
        self.reduce_wait_ns: dict[int, int] = {}
        self.step_start_ns = 0

    def begin_step(self) -> None:
        """Forget the last step."""
        self.reduce.clear()
        self.reduce_wait_ns.clear()
        self.step_start_ns = monotonic_ns()

    def replay(self, rank: int, hooks: Sequence[ActionHook]) -> None:
        """Call each hook once per action of the last step and once per bucket's ALL_REDUCE (whose chunk is the bucket's
        number), in the order of their starts.
        """
        events = [
            (self.start_ns[i], action.stage, action.chunk, str(action.op), self.end_ns[i])
            for i, action in enumerate(self.actions)
        ]
        events += [(t0, stage, bucket, "ALL_REDUCE", t1) for stage, bucket, t0, t1 in self.reduce]
        for t0, stage, chunk, op, t1 in sorted(events):
            for hook in hooks:
                hook(rank, stage, chunk, op, t0, t1)
