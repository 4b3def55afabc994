"""V-Half (arXiv 2405.15362): half the activations of 1F1B, on two stages per rank in the shape of a V.

One chunk's forwards and input gradients are laid out so that the next chunk's fit between them six units later; the
weight gradients take the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagekit.plan.actions import Op
from stagekit.plan.costs import Costs
from stagekit.plan.schedules.list_scheduling import UNKNOWN, Run, Wakes
from stagekit.plan.schedules.tables import Orders, v_pairs

_PERIOD = 6  # F, I and W of two stages, of one unit each
# Where F, F, I and I of a chunk start: units from rank to rank (half of what ZB-V takes, so half the activations), and
# units that each turn of the V takes. Of all that fit into each other these leave the fewest gaps: 3p − 5 units in a
# rank's span for p ≥ 4, found by trying every one for p up to 10.
_STEPS = (1, 2, 1, 2)
_TURNS = ((4, 1, 5), (1, 1, 2))  # p even, p odd


def orders(stage_ranks: Sequence[int], num_ranks: int, num_chunks: int) -> Orders:
    """Return V-Half: holds p + 2 (stage, chunk) activations, which is p / 2 + 1 chunks."""
    v_pairs("v-half", stage_ranks, num_ranks)
    block = _block(num_ranks)
    order = []
    for rank in range(num_ranks):
        steps = zip((Op.F, Op.F, Op.I, Op.I), (rank, *(2 * num_ranks - 1 - rank,) * 2, rank), block[rank], strict=True)
        placed = [(at + _PERIOD * c, op, stage, c) for op, stage, at in steps for c in range(num_chunks)]
        order.append([(op, stage, chunk) for _, op, stage, chunk in sorted(placed)])
    lists = _Filled(stage_ranks, num_ranks, num_chunks, order, num_ranks + 2).run()
    assert lists is not None
    return lists


def _block(num_ranks: int) -> list[tuple[int, int, int, int]]:
    """Return when each rank starts F, F, I and I of chunk 0."""
    down, up, back, home = _STEPS
    hops = num_ranks - 1
    second, third, fourth = _TURNS[num_ranks % 2]
    second += down * hops
    third += second + up * hops
    fourth += third + back * hops
    return [
        (down * r, second + up * (hops - r), third + back * r, fourth + home * (hops - r)) for r in range(num_ranks)
    ]


class _Filled(Run):
    """Runs a given order of F and I; a W goes where nothing else could run for its length, or where memory is full."""

    def __init__(
        self,
        stage_ranks: Sequence[int],
        num_ranks: int,
        num_chunks: int,
        order: list[list[tuple[Op, int, int]]],
        limit: int,
    ) -> None:
        super().__init__(stage_ranks, num_ranks, num_chunks, Costs.unit(len(stage_ranks)))
        self._left = [list(reversed(row)) for row in order]
        self._limit = limit

    def decide(self, number: int, now: float) -> Wakes:
        rank, left = self.ranks[number], self._left[number]
        ready, is_full = UNKNOWN, False
        if left:
            op, stage, chunk = left[-1]
            if op is Op.F:
                ready, is_full = self.forward_ready[stage][chunk], rank.held + 1 > self._limit
            elif chunk < self.next_forward[stage]:
                ready = self.backward_ready[stage][chunk]
        if rank.waiting and (is_full or ready - now >= 1):
            return self.start(number, Op.W, *rank.waiting.popleft(), now)
        if ready <= now:
            return self.start(number, *left.pop(), now)
        return [(ready, number)] if ready < UNKNOWN else []
