"""1F1B and what is made of it by warming up longer or by putting weight gradients off.

All four are one pattern: some forwards ahead, then a backward and a forward in turn, then the backwards that are left.
A rank may hold several consecutive stages, which it runs as one.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagekit.plan.actions import Op
from stagekit.plan.schedules.tables import Orders, blocks, spread


def one_f_one_b(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """1F1B (PipeDream-flush): warm up with the chunks that fit ahead, then alternate, then drain.

    Rank r of p runs min(p − r, m) forwards ahead of its first backward and so holds at most p − r chunks.
    """
    own = blocks("1f1b", stage_ranks, num_ranks)
    return tuple(spread(own[r], _full(num_chunks, num_ranks - r)) for r in range(num_ranks))


def eager_one_f_one_b(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """1F1B for slow links: rank r runs 2(p − r) − 1 forwards ahead, so that a hop each way hides behind a chunk."""
    own = blocks("eager-1f1b", stage_ranks, num_ranks)
    return tuple(spread(own[r], _full(num_chunks, 2 * (num_ranks - r) - 1)) for r in range(num_ranks))


def zb_h1(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose rank r puts r weight gradients off, to fill its drain. Holds p activations."""
    own = blocks("zb-h1", stage_ranks, num_ranks)
    return tuple(spread(own[r], _split(num_chunks, num_ranks - r, r)) for r in range(num_ranks))


def zb_h2(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """ZB-H2 (arXiv 2401.10241): more forwards ahead, and 2r weight gradients put off. Holds 2p − 1 activations."""
    own = blocks("zb-h2", stage_ranks, num_ranks)
    return tuple(spread(own[r], _split(num_chunks, 2 * (num_ranks - r) - 1, 2 * r)) for r in range(num_ranks))


def _full(num_chunks: int, ahead: int) -> list[tuple[Op, int]]:
    steps = [(Op.F, chunk) for chunk in range(min(ahead, num_chunks))]
    for chunk in range(num_chunks):
        steps.append((Op.B, chunk))
        if ahead + chunk < num_chunks:
            steps.append((Op.F, ahead + chunk))
    return steps


def _split(num_chunks: int, ahead: int, put_off: int) -> list[tuple[Op, int]]:
    """Backwards in two halves: W of a chunk comes `put_off` chunks after its I, the rest at the end."""
    steps = [(Op.F, chunk) for chunk in range(min(ahead, num_chunks))]
    for chunk in range(num_chunks):
        steps.append((Op.I, chunk))
        if chunk >= put_off:
            steps.append((Op.W, chunk - put_off))
        if ahead + chunk < num_chunks:
            steps.append((Op.F, ahead + chunk))
    return steps + [(Op.W, chunk) for chunk in range(max(0, num_chunks - put_off), num_chunks)]
