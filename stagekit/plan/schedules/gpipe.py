"""GPipe and breadth-first: all forwards, then all backwards. Any table of stages, any number of chunks.

With several stages per rank this is looped BFS (arXiv 2211.05953). Every chunk is held; nothing else has so few changes
of direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagekit.plan.actions import Action, Op
from stagekit.plan.schedules.tables import Orders, stages_of


def orders(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
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
