"""A schedule of the user's: a CSV file, a line per rank, as stagekit and torch.distributed.pipelining write them.

The one place of stagekit.plan that reads a file. Transfers in it are dropped for planning, because lowering adds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stagekit.errors import ScheduleError
from stagekit.plan.actions import COMPUTE, Action, from_csv
from stagekit.plan.grid import grid


def load(path: str) -> tuple[tuple[Action, ...], ...]:
    """Return the lists of a CSV file. Raises ScheduleError where it can't be read, naming line and cell."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"schedule {path}: {error}; give a readable CSV file, a line per rank") from error
    try:
        lists = from_csv(text)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {path}, {error}") from error
    if not lists or not any(lists):
        raise ScheduleError(f"schedule {path} holds no action; write a line per rank, e.g. 0F0,0F1,0B0,0B1")
    return lists


def compute_only(lists: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return the lists without transfers and reductions."""
    return tuple(tuple(action for action in row if action.op in COMPUTE) for row in lists)


def table_of(lists: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return the rank of each stage: where most of its actions are. Raises ScheduleError for a gap in the stages."""
    counts = Counter((action.stage, rank) for rank, row in enumerate(lists) for action in row if action.op in COMPUTE)
    stages = sorted({stage for stage, _ in counts})
    missing = next((number for number, stage in enumerate(stages) if stage != number), None)
    if missing is not None or not stages:
        raise ScheduleError(f"stage {missing or 0} has no action, but stages count from 0\n{grid(lists)}")
    return tuple(max(range(len(lists)), key=lambda rank, s=stage: counts[s, rank]) for stage in stages)  # type: ignore[misc]


def num_chunks_of(lists: Sequence[Sequence[Action]]) -> int:
    """Return how many chunks the lists speak of."""
    return 1 + max((action.chunk for row in lists for action in row if action.op in COMPUTE), default=-1)
