"""Compute orders: which chunk runs when on each rank. Transfers are added by lowering, nothing here knows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stagekit.errors import ScheduleError
from stagekit.plan.schedules.gpipe import gpipe
from stagekit.plan.schedules.interleaved import interleaved
from stagekit.plan.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b, zb_h1, zb_h2
from stagekit.plan.schedules.tables import Orders as Orders
from stagekit.plan.schedules.tables import placement as placement
from stagekit.plan.schedules.tables import stages_of as stages_of

SCHEDULES: dict[str, Callable[[Sequence[int], int, int], Orders]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "bfs": gpipe,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "eager-1f1b": eager_one_f_one_b,
}


def compute_order(schedule: str, stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """Return each rank's F and B actions. Raises ScheduleError for a schedule that is unknown or can't run these."""
    if schedule not in SCHEDULES:
        raise ScheduleError(f'schedule "{schedule}" is unknown; there are {", ".join(SCHEDULES)}')
    if num_chunks < 1:
        raise ScheduleError(f"chunks is {num_chunks}; at least 1 is needed")
    return SCHEDULES[schedule](stage_ranks, num_ranks, num_chunks)
