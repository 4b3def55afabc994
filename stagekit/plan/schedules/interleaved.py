"""Interleaved 1F1B (arXiv 2104.04473): each rank holds every p-th stage and goes round them chunk group by chunk group.

Chunks go in groups of at least p (the last stage of a round hands over to the first just in time); where p does not
divide m, the groups are a little larger. Fewer chunks than ranks make one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action, Op
from stagekit.plan.schedules.tables import Orders, placement, stages_of


def orders(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """Rank r runs its stages in turn; 2(p − r − 1) + (v − 1)·group forwards ahead, then one backward, one forward."""
    if tuple(stage_ranks) != placement(len(stage_ranks), num_ranks) or len(stage_ranks) % num_ranks:
        each, left = divmod(len(stage_ranks), num_ranks)
        near = max(1, round(len(stage_ranks) / num_ranks)) * num_ranks
        there = f"there are {len(stage_ranks)} stages on {num_ranks} ranks; use {near} stages"
        if not left:
            there = f"these lie on ranks {list(stage_ranks)}; use stages_per_rank: {each}"
        raise ScheduleError(
            f"interleaved runs the same number of stages on each rank, stage s on rank s modulo {num_ranks}, but {there}, "
            "or gpipe or bfs"
        )
    groups = chunk_groups(num_ranks, num_chunks)
    rows = []
    for rank in range(num_ranks):
        own = stages_of(rank, stage_ranks)
        forwards = [Action(Op.F, stage, chunk) for group in groups for stage in own for chunk in group]
        backwards = [Action(Op.B, stage, chunk) for group in groups for stage in reversed(own) for chunk in group]
        ahead = min((len(own) - 1) * len(groups[0]) + 2 * (num_ranks - rank - 1), len(forwards) - 1)
        row = forwards[:ahead]
        for backward, forward in zip(backwards, forwards[ahead:], strict=False):
            row += (forward, backward)
        rows.append(tuple(row + backwards[len(forwards) - ahead :]))
    return tuple(rows)


def chunk_groups(size: int, num_chunks: int) -> list[range]:
    """Cut the chunks into groups of `size` or a little more, the larger ones first."""
    count = max(1, num_chunks // size)
    base, more = divmod(num_chunks, count)
    begins = [0]
    for number in range(count):
        begins.append(begins[-1] + base + (number < more))
    return [range(a, b) for a, b in pairwise(begins)]
