"""Compute orders: which chunk runs when on each rank. Transfers are added by lowering, nothing here knows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action, Op

Orders = tuple[tuple[Action, ...], ...]


def placement(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage: stage modulo ranks."""
    return tuple(stage % num_ranks for stage in range(num_stages))


def stages_of(rank: int, stage_ranks: Sequence[int]) -> list[int]:
    """Return the stages of `rank`, ascending."""
    return [stage for stage, owner in enumerate(stage_ranks) if owner == rank]


def gpipe(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """All forwards, then all backwards, both in chunk order; several stages per rank run breadth first.

    Backwards run in chunk order (not reversed), so that gradients accumulate in the order of a plain loop.
    """
    rows = []
    for rank in range(num_ranks):
        own = stages_of(rank, stage_ranks)
        forwards = [Action(Op.F, stage, chunk) for stage in own for chunk in range(num_chunks)]
        backwards = [Action(Op.B, stage, chunk) for stage in reversed(own) for chunk in range(num_chunks)]
        rows.append(tuple(forwards + backwards))
    return tuple(rows)


def one_f_one_b(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """1F1B (PipeDream-flush): warm up with the chunks that fit ahead, then alternate, then drain.

    Rank r of p runs min(p − r, m) forwards ahead of its first backward and so holds at most p − r chunks.
    """
    if len(stage_ranks) != num_ranks:
        raise ScheduleError(
            f"1f1b runs one stage per rank, but there are {len(stage_ranks)} stages on {num_ranks} ranks; "
            f"use gpipe, or {len(stage_ranks)} ranks (stages_per_rank: 1)"
        )
    rows = []
    for rank in range(num_ranks):
        (stage,) = stages_of(rank, stage_ranks)
        warmup = min(num_ranks - rank, num_chunks)
        row = [Action(Op.F, stage, chunk) for chunk in range(warmup)]
        for chunk in range(num_chunks):
            row.append(Action(Op.B, stage, chunk))
            if warmup + chunk < num_chunks:
                row.append(Action(Op.F, stage, warmup + chunk))
        rows.append(tuple(row))
    return tuple(rows)


SCHEDULES: dict[str, Callable[[Sequence[int], int, int], Orders]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def compute_order(schedule: str, stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """Return each rank's F and B actions. Raises ScheduleError for a schedule that is unknown or can't run these."""
    if schedule not in SCHEDULES:
        raise ScheduleError(f'schedule "{schedule}" is unknown; there are {", ".join(SCHEDULES)}')
    if num_chunks < 1:
        raise ScheduleError(f"chunks is {num_chunks}; at least 1 is needed")
    return SCHEDULES[schedule](stage_ranks, num_ranks, num_chunks)
