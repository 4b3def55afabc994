"""DualPipe-V (DeepSeek-V3, arXiv 2412.19437, cut in half): forwards of one stage run beside backwards of the other.

Two stages per rank in the shape of a V. The pairs (F, B) stand side by side in the lists, for an executor that overlaps
them and for torch's OVERLAP_F_B; one that does not runs them one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action
from stagekit.plan.schedules.phases import Phases
from stagekit.plan.schedules.tables import Orders, v_pairs


def orders(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """Return DualPipe-V: holds at most 2p + 1 (stage, chunk) activations. Raises ScheduleError for fewer than 2p chunks."""
    v_pairs("dualpipe-v", stage_ranks, num_ranks)
    if num_chunks < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe-v fills a V of {2 * num_ranks} stages before its first backward: {num_chunks} chunks are too few, "
            f"use at least {2 * num_ranks}, or zb-v"
        )
    return tuple(
        _row(rank, num_ranks, num_chunks, Phases(rank, 2 * num_ranks - 1 - rank, num_chunks))
        for rank in range(num_ranks)
    )


def _row(rank: int, num_ranks: int, num_chunks: int, it: Phases) -> tuple[Action, ...]:
    behind = num_ranks - rank - 1  # ranks between this one and the turn of the V
    for _ in range(2 * behind):
        it.forward(it.near)
    for _ in range(rank + 1):
        it.forward(it.near)
        it.forward(it.far)
    for _ in range(behind):
        it.input_grad(it.far)
        it.weight_grad()
        it.forward(it.far)
    for _ in range(num_chunks - 2 * num_ranks + rank + 1):
        it.forward(it.near)
        it.backward(it.far)
        it.forward(it.far)
        it.backward(it.near)
    for _ in range(behind):
        it.backward(it.far)
        it.forward(it.far)
        it.backward(it.near)
    for turn in range(2 * (rank + 1)):  # the second half of the drain puts its W off
        put_off = turn > rank
        (it.input_grad if put_off else it.backward)(it.near if turn % 2 else it.far)
    for _ in range(behind):
        it.weight_grad()
        it.input_grad(it.near)
    return it.rest()
