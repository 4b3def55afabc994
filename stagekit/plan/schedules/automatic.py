"""Automatic zero bubble: the best of some greedy schedules and of those made by hand, under a memory limit.

Reaches what the paper's own search finds within p and 2p activations (arXiv 2401.10241, Table 5), for costs of any
shape and any table of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Op
from stagekit.plan.costs import Costs
from stagekit.plan.forecast import forecast
from stagekit.plan.schedules import one_f_one_b, v_half, zb_v
from stagekit.plan.schedules.list_scheduling import UNKNOWN, Run, Wakes
from stagekit.plan.schedules.tables import Orders, stages_of, v_placement

_SLACK = 1e-9  # of sums of shares of activations


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank prefers, after an I that is ready. `limit`: most activations held, a fraction left after an I.

    `ahead[rank]`: most forwards without their I. A ready forward goes first until more than `put_off[rank]` W wait. A W
    runs into a gap of at least `patience` times its length.
    """

    limit: float
    ahead: tuple[int, ...]
    put_off: tuple[int, ...]
    patience: float


def orders(
    stage_ranks: Sequence[int], num_ranks: int, num_chunks: int, costs: Costs, memory_limit: float | None
) -> Orders:
    """Return the lists with the shortest span of a rank, first start to last end, found under `memory_limit`.

    The limit is in (stage, chunk) activations per rank; by default what 1F1B holds, ranks × stages per rank. Raises
    ScheduleError where it is below the stages of a rank.
    """
    own = [stages_of(rank, stage_ranks) for rank in range(num_ranks)]
    most = max(map(len, own))
    limit = float(num_ranks * most if memory_limit is None else memory_limit)
    if limit < most:
        raise ScheduleError(
            f"zb-auto: a memory limit of {limit:g} activations is less than the {most} stages of a rank; a chunk needs "
            f"one in each: at least {most}, and {num_ranks * most} to keep {num_ranks} ranks busy"
        )
    work = [
        num_chunks * sum(costs.forward[s] + costs.input_grad[s] + costs.weight_grad[s] for s in stages)
        for stages in own
    ]
    best, best_cost = _by_hand(stage_ranks, num_ranks, num_chunks, costs, limit)
    for policy in _policies(own, num_ranks, num_chunks, limit):
        run = _Greedy(stage_ranks, num_ranks, num_chunks, costs, policy)
        lists = run.run(idle_limit=best_cost - min(work))
        cost = max(rank.idle + busy for rank, busy in zip(run.ranks, work, strict=True))
        if lists is not None and cost < best_cost:
            best, best_cost = lists, cost
            if cost <= max(work):
                break  # no span can be shorter
    assert best is not None
    return best


def _by_hand(
    stage_ranks: Sequence[int], num_ranks: int, num_chunks: int, costs: Costs, limit: float
) -> tuple[Orders | None, float]:
    """Return the best schedule made by hand for this table that fits, and its longest span; None if none does."""
    makers: Sequence[Callable[[Sequence[int], int, int], Orders]] = (
        one_f_one_b.one_f_one_b,
        one_f_one_b.zb_h1,
        one_f_one_b.zb_h2,
    )
    if tuple(stage_ranks) == v_placement(2 * num_ranks, num_ranks):
        makers = (v_half.orders, zb_v.orders)
    elif any(before > after for before, after in pairwise(stage_ranks)):
        return None, UNKNOWN
    best: Orders | None = None
    best_cost = UNKNOWN
    for make in makers:
        lists = make(stage_ranks, num_ranks, num_chunks)
        result = forecast(lists, stage_ranks, costs)
        if max(result.peak_held) <= limit + _SLACK and result.cost < best_cost:
            best, best_cost = lists, result.cost
    return best, best_cost


def _policies(own: list[list[int]], num_ranks: int, num_chunks: int, limit: float) -> Iterator[Policy]:
    """Yield what is tried: a warm-up as ZB-H2 or without limit; W late, or as in ZB-H2 and ZB-H1.

    Where ranks have several stages, only what won on 40 random chains: the rest together was worth 0.1 %.
    """
    per_rank = [len(stages) for stages in own]
    endless = (num_chunks * max(per_rank),) * num_ranks
    if max(per_rank) > 1:
        for put_off, patiences in ((endless, (0.3, 0.0, 0.15, 0.5)), ((num_ranks,) * num_ranks, (0.0, 0.3))):
            for patience in patiences:
                yield Policy(limit, endless, put_off, patience)
        return
    for put_off in (endless, tuple(2 * r for r in range(num_ranks)), tuple(range(num_ranks))):
        for ahead in (tuple(2 * (num_ranks - r) - 1 for r in range(num_ranks)), endless):
            for patience in (0.0, 0.3, 1.0):
                yield Policy(limit, ahead, put_off, patience)


class _Greedy(Run):
    def __init__(
        self, stage_ranks: Sequence[int], num_ranks: int, num_chunks: int, costs: Costs, policy: Policy
    ) -> None:
        super().__init__(stage_ranks, num_ranks, num_chunks, costs)
        self._policy = policy

    def decide(self, number: int, now: float) -> Wakes:
        rank, policy = self.ranks[number], self._policy
        soonest = UNKNOWN
        for stage in reversed(rank.stages):
            chunk = self.next_backward[stage]
            if chunk < self.next_forward[stage]:
                ready = self.backward_ready[stage][chunk]
                if ready <= now:
                    return self.start(number, Op.I, stage, chunk, now)
                soonest = min(soonest, ready)
        forward = self._forward(number)
        if forward is not None:
            chunk = self.next_forward[forward]
            ready = self.forward_ready[forward][chunk]
            if ready <= now and len(rank.waiting) <= policy.put_off[number]:
                return self.start(number, Op.F, forward, chunk, now)
            soonest = min(soonest, ready)
        if rank.waiting:
            gap = policy.patience * self.costs.weight_grad[rank.waiting[0][0]]
            if soonest <= now or soonest - now >= gap:
                return self.start(number, Op.W, *rank.waiting.popleft(), now)
        return [(soonest, number)] if soonest < UNKNOWN else []

    def _forward(self, number: int) -> int | None:
        """Return the stage whose forward is next: of those with room the deepest ready one, else the first to be.

        Room is left for the rest of a chunk's way through the rank, so that the lists always end.
        """
        rank, policy = self.ranks[number], self._policy
        found, earliest = None, UNKNOWN
        for later, stage in enumerate(reversed(rank.stages)):
            chunk = self.next_forward[stage]
            if chunk >= self.num_chunks or rank.held + 1 + later > policy.limit + _SLACK:
                continue
            if rank.in_flight + later >= policy.ahead[number]:
                continue
            ready = self.forward_ready[stage][chunk]
            if ready <= rank.clock:
                return stage
            if ready < earliest:
                found, earliest = stage, ready
        return found
