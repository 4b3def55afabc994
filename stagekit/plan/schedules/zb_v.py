"""ZB-V (arXiv 2401.10241, section 6): no bubble in a rank's span where F, I and W take the same time.

Two stages per rank in the shape of a V, and on each rank the activations of 1F1B's rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagekit.plan.actions import Action
from stagekit.plan.schedules.phases import Phases
from stagekit.plan.schedules.tables import Orders, v_pairs


def orders(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """Return ZB-V: holds at most 2p (stage, chunk) activations, which is p chunks, on every rank."""
    v_pairs("zb-v", stage_ranks, num_ranks)
    return tuple(_row(rank, num_ranks, Phases(rank, 2 * num_ranks - 1 - rank, num_chunks)) for rank in range(num_ranks))


def _row(rank: int, num_ranks: int, it: Phases) -> tuple[Action, ...]:
    for _ in range(2 * (num_ranks - rank) - 1):
        it.forward(it.near)
    for _ in range(rank):
        it.forward(it.far)
        it.forward(it.near)
    for _ in range(num_ranks - rank):
        it.forward(it.far)
        it.input_grad(it.far)
        it.weight_grad()
    while it.has_forwards():
        for stage in (it.near, it.far):
            it.forward(stage)
            it.input_grad(stage)
            it.weight_grad()
    for _ in range(rank):
        it.input_grad(it.near)
        it.input_grad(it.far)
    while it.has_backwards():
        it.input_grad(it.near)
        it.input_grad(it.far)
        it.weight_grad()
    return it.rest()
