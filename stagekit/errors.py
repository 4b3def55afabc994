"""Every error that stagekit raises on purpose. The type says who must act.

StagekitError
├── UserError           fix the call, the program or the model
│   ├── CaptureError    the model can't be captured, or its capture differs from it
│   ├── SplitError      it can't be cut as asked
│   ├── ScheduleError   the action lists are no valid schedule (carries the grid)
│   ├── WeightsError    start weights that are not there, damaged, or another model's
│   └── ShapeError      a batch that the captured pipeline can't take
├── StageError          user code or a kernel raised inside a stage: names rank, stage, chunk, op
│   └── RemoteError     … on another rank: this one dropped the step too
├── PeerError           a neighbour died or went silent: this rank is a victim
└── BugError            ours
"""

from __future__ import annotations

from collections.abc import Sequence


class StagekitError(Exception):
    """Base of all errors below."""


class UserError(StagekitError):
    """The caller must change something; the text says what, where, the limit and the next step."""


class CaptureError(UserError):
    """The model can't be captured, or the captured graph does not compute what the model computes."""


class SplitError(UserError):
    """The model can't be cut as asked."""


class ScheduleError(UserError):
    """An action list that is not a valid schedule; the text shows the rank × step grid.

    `cycle` names, for a deadlock, who waits for whom: each for the next, the last for the first.
    """

    def __init__(self, message: str, *, cycle: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.cycle = tuple(cycle)


class WeightsError(UserError):
    """Start weights that can't be read, or don't fit the model."""


class ShapeError(UserError):
    """A batch, chunk or target whose shape or dtype the captured pipeline can't take."""


class StageError(StagekitError):
    """Something raised while a stage ran; `__cause__` is the original exception. `rank` counts in the group of all replicas."""

    def __init__(self, message: str, *, rank: int, stage: int, chunk: int, op: str) -> None:
        super().__init__(message)
        self.rank, self.stage, self.chunk, self.op = rank, stage, chunk, op


class RemoteError(StageError):
    """Another rank failed in this step, which every rank dropped; `traceback` is that rank's, and also in the notes.

    `stage` and `chunk` are -1 and `op` is empty where it failed outside its stages:
    in its arguments, say.
    """

    def __init__(self, message: str, *, rank: int, stage: int, chunk: int, op: str, traceback: str) -> None:
        super().__init__(message, rank=rank, stage=stage, chunk=chunk, op=op)
        self.traceback = traceback


class PeerError(StagekitError):
    """A transfer or a collective failed because of another rank (`peer_rank`, -1 when unknown)."""

    def __init__(self, message: str, *, peer_rank: int = -1) -> None:
        super().__init__(message)
        self.peer_rank = peer_rank


class BugError(StagekitError):
    """An invariant of ours does not hold."""
