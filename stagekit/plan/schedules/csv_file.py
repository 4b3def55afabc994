"""A schedule of the user's: a CSV file, a line per rank, as stagekit and torch.distributed.pipelining write them.

The one place of stagekit.plan that reads a file. Transfers in it are dropped for planning, because lowering adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stagekit.errors import ScheduleError
from stagekit.plan.actions import COMPUTE, Action, from_csv


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
    """Return the rank of each stage, by where its forwards are. Raises ScheduleError for a stage on no or two ranks."""
    found: dict[int, int] = {}
    for rank, row in enumerate(lists):
        for action in row:
            if action.op in COMPUTE and found.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{action} is on rank {rank}, but stage {action.stage} began on rank {found[action.stage]}"
                )
    missing = [stage for stage in range(max(found, default=-1) + 1) if stage not in found]
    if missing:
        raise ScheduleError(f"stage {missing[0]} has no action, but stage {max(found)} has; stages count from 0")
    return tuple(found[stage] for stage in sorted(found))


def num_chunks_of(lists: Sequence[Sequence[Action]]) -> int:
    """Return how many chunks the lists speak of."""
    return 1 + max((action.chunk for row in lists for action in row if action.op in COMPUTE), default=-1)
