"""Stage → rank tables, and what the schedules ask of them."""

from __future__ import annotations

from collections.abc import Sequence

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action, Op

Orders = tuple[tuple[Action, ...], ...]
PerRank = int | tuple[int, ...]  # stages of each rank; one number: all have as many, and the schedule says which


def placement(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage: stage modulo ranks."""
    return tuple(stage % num_ranks for stage in range(num_stages))


def v_placement(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage: up the ranks and down again, so that rank 0 holds the first and the last of two."""
    there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
    return tuple(there_and_back[stage % len(there_and_back)] for stage in range(num_stages))


def block_placement(per_rank: Sequence[int]) -> tuple[int, ...]:
    """Return the rank of each stage where rank r holds the next `per_rank[r]` stages."""
    return tuple(rank for rank, count in enumerate(per_rank) for _ in range(count))


def ranks_for(num_stages: int, per_rank: PerRank) -> int:
    """Return how many ranks hold `num_stages` stages."""
    return len(per_rank) if isinstance(per_rank, tuple) else num_stages // per_rank


def stages_of(rank: int, stage_ranks: Sequence[int]) -> list[int]:
    """Return the stages of `rank`, ascending."""
    return [stage for stage, owner in enumerate(stage_ranks) if owner == rank]


def blocks(schedule: str, stage_ranks: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return each rank's stages if they are consecutive and in the order of the ranks. Raises ScheduleError if not."""
    own = [stages_of(rank, stage_ranks) for rank in range(num_ranks)]
    if [stage for stages in own for stage in stages] != list(range(len(stage_ranks))) or not all(own):
        raise ScheduleError(
            f"{schedule} runs one stage per rank (or consecutive ones), but there are {len(stage_ranks)} stages on {num_ranks} ranks; "
            f"use gpipe, bfs or interleaved, or {len(stage_ranks)} ranks (stages_per_rank: 1)"
        )
    return own


def v_pairs(schedule: str, stage_ranks: Sequence[int], num_ranks: int) -> None:
    """Raise ScheduleError unless each rank holds two stages in the shape of a V."""
    if tuple(stage_ranks) != v_placement(2 * num_ranks, num_ranks):
        raise ScheduleError(
            f"{schedule} runs two stages per rank, up the ranks and down again: {2 * num_ranks} stages on {num_ranks} "
            f"ranks at {list(v_placement(2 * num_ranks, num_ranks))}, not {len(stage_ranks)} at {list(stage_ranks)}; "
            "use stages_per_rank: 2"
        )


def spread(stages: Sequence[int], steps: Sequence[tuple[Op, int]]) -> tuple[Action, ...]:
    """Return the list of a rank that runs its consecutive `stages` as if they were one: (op, chunk) by (op, chunk)."""
    return tuple(
        Action(op, stage, chunk) for op, chunk in steps for stage in (stages if op is Op.F else reversed(stages))
    )
