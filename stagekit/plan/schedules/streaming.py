"""Forward only, for scoring and evaluation: chunks stream through, and no rank holds more of them than a group.

Any table of stages. With several stages per rank the chunks go round in groups of at least p, as in interleaved 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagekit.plan.actions import Action, Op
from stagekit.plan.schedules.interleaved import chunk_groups
from stagekit.plan.schedules.tables import Orders, stages_of


def orders(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """Return lists of forwards. Send credits bound how far a rank may run ahead of the next one."""
    groups = chunk_groups(num_ranks, num_chunks)
    return tuple(
        tuple(
            Action(Op.F, stage, chunk) for group in groups for stage in stages_of(rank, stage_ranks) for chunk in group
        )
        for rank in range(num_ranks)
    )
