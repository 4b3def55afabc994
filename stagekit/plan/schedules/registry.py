"""Compute orders: which chunk runs when on each rank. Transfers are added by lowering, nothing here knows of them.

One module per family beside this one; SCHEDULES names them. Called by stagekit.plan.plan and `python -m stagekit.plan`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Op
from stagekit.plan.costs import Costs as Costs
from stagekit.plan.schedules import (
    automatic,
    csv_file,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    streaming,
    v_half,
    zb_v,
)
from stagekit.plan.schedules.tables import Orders as Orders
from stagekit.plan.schedules.tables import PerRank as PerRank
from stagekit.plan.schedules.tables import block_placement
from stagekit.plan.schedules.tables import placement as placement
from stagekit.plan.schedules.tables import ranks_for as ranks_for
from stagekit.plan.schedules.tables import stages_of as stages_of
from stagekit.plan.schedules.tables import v_placement as v_placement


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a name stands for: its lists (of a stage → rank table, ranks, chunks), and the table it wants."""

    orders: Callable[[Sequence[int], int, int], Orders]
    table: Callable[[int, int], tuple[int, ...]] = placement  # (stages, ranks) → rank of each stage
    stages_per_rank: int = 1  # unless told: 2 where nothing else would do


FORWARD = "forward"  # alone has no backward
AUTOMATIC = "zb-auto"  # alone asks for costs and a memory limit
SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe.orders),
    "1f1b": Schedule(one_f_one_b.one_f_one_b),
    "interleaved": Schedule(interleaved.orders),
    "bfs": Schedule(gpipe.orders),
    "zb-h1": Schedule(one_f_one_b.zb_h1),
    "zb-h2": Schedule(one_f_one_b.zb_h2),
    "zb-v": Schedule(zb_v.orders, v_placement, 2),
    "v-half": Schedule(v_half.orders, v_placement, 2),
    "eager-1f1b": Schedule(one_f_one_b.eager_one_f_one_b),
    "dualpipe-v": Schedule(dualpipe.orders, v_placement, 2),
    FORWARD: Schedule(streaming.orders),
}
NAMES = (*SCHEDULES, AUTOMATIC)


def is_file(schedule: str) -> bool:
    """Say whether `schedule` names a CSV file."""
    return schedule.lower().endswith(".csv")


def is_forward_only(schedule: str) -> bool:
    """Say whether the lists of `schedule` hold forwards alone. Raises ScheduleError for a file that can't be read."""
    if is_file(schedule):
        return all(action.op is Op.F for row in csv_file.compute_only(csv_file.load(schedule)) for action in row)
    return schedule == FORWARD


def table_for(schedule: str, num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage that `schedule` wants. Raises ScheduleError for a file about other numbers."""
    if is_file(schedule):
        lists = csv_file.load(schedule)
        table = csv_file.table_of(lists)
        if (len(table), len(lists)) != (num_stages, num_ranks):
            raise ScheduleError(
                f"schedule {schedule} is for {len(table)} stages on {len(lists)} ranks, not for {num_stages} on {num_ranks}"
            )
        return table
    return (
        SCHEDULES[schedule].table(num_stages, num_ranks) if schedule in SCHEDULES else placement(num_stages, num_ranks)
    )


def per_rank_of(schedule: str, num_stages: int, per_rank: PerRank) -> PerRank:
    """Return the stages of each rank as `schedule` has them: a file says so itself, any other has `per_rank`.

    Raises ScheduleError for a file about other numbers; a `per_rank` of 1 asks for none.
    """
    if not is_file(schedule):
        return per_rank
    lists = csv_file.load(schedule)
    table = csv_file.table_of(lists)
    counts = tuple(table.count(rank) for rank in range(len(lists)))
    asked = per_rank if isinstance(per_rank, tuple) else (per_rank,) * len(lists)
    if len(table) != num_stages or (per_rank != 1 and asked != counts):
        held = str(counts[0]) if len(set(counts)) == 1 else str(list(counts))
        raise ScheduleError(
            f"schedule {schedule} is for {len(table)} stages on {len(lists)} ranks, {held} on each, not for {num_stages} "
            f"with {per_rank if isinstance(per_rank, int) else list(per_rank)}; ask for stages={len(table)} and leave "
            "stages_per_rank out"
        )
    return counts[0] if len(set(counts)) == 1 else counts


def stage_table(schedule: str, num_stages: int, per_rank: PerRank) -> tuple[int, ...]:
    """Return the rank of each stage; unequal numbers of stages are blocks. Raises ScheduleError."""
    per_rank = per_rank_of(schedule, num_stages, per_rank)
    if isinstance(per_rank, tuple) and not is_file(schedule):
        return block_placement(per_rank)
    return table_for(schedule, num_stages, ranks_for(num_stages, per_rank))


def check(schedule: str, num_stages: int, stages_per_rank: PerRank, num_chunks: int) -> None:
    """Raise ScheduleError where `schedule` can't run these numbers. What zb-auto finds is seen when it is asked."""
    if schedule != AUTOMATIC:
        table = stage_table(schedule, num_stages, stages_per_rank)
        compute_order(schedule, table, max(table) + 1, num_chunks)


def compute_order(
    schedule: str,
    stage_ranks: Sequence[int],
    num_ranks: int,
    num_chunks: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Orders:
    """Return each rank's F, B, I and W.

    `costs` (all equal by default) and `memory_limit` (most (stage, chunk) activations of a rank) are for zb-auto.
    Raises ScheduleError for a schedule that is unknown or can't run these numbers, and says which would do.
    """
    if num_chunks < 1:
        raise ScheduleError(f"chunks is {num_chunks}; at least 1 is needed")
    if not stage_ranks or set(stage_ranks) != set(range(num_ranks)):
        raise ScheduleError(
            f"stages are on ranks {list(stage_ranks)}; each of the {num_ranks} ranks needs at least one stage"
        )
    if is_file(schedule):
        lists = csv_file.load(schedule)
        if csv_file.num_chunks_of(lists) != num_chunks:
            raise ScheduleError(
                f"schedule {schedule} is for {csv_file.num_chunks_of(lists)} chunks, not for {num_chunks}"
            )
        return csv_file.compute_only(lists)
    if schedule == AUTOMATIC:
        return automatic.orders(stage_ranks, num_ranks, num_chunks, costs or Costs.unit(len(stage_ranks)), memory_limit)
    if schedule not in SCHEDULES:
        asked = NAMES if schedule == "auto" else (*NAMES, "auto")  # which callers know that can choose
        near = difflib.get_close_matches(schedule.lower(), asked, n=1)
        hint = f' (did you mean "{near[0]}"?)' if near else ""
        raise ScheduleError(f'schedule "{schedule}" is unknown{hint}; there are {", ".join(NAMES)}, or a .csv file')
    return SCHEDULES[schedule].orders(stage_ranks, num_ranks, num_chunks)
