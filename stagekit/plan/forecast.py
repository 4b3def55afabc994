"""The timeline's numbers for compute lists of a chain, without lists of transfers: for comparing many of them. Pure.

What stagekit.plan.timeline says of the same lists under the implicit transport, at a tenth of the price. Called by the
automatic schedule and by whoever chooses among schedules; what is chosen is then lowered, verified and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action, Op
from stagekit.plan.costs import Costs


@dataclass(frozen=True, slots=True)
class Forecast:
    """As in stagekit.plan.timeline.Timeline; `peak_held[rank]` counts (stage, chunk) activations, `kept` left after I."""

    makespan: float
    cost: float
    bubble: float
    bubble_span: float
    peak_held: tuple[float, ...]


def forecast(orders: Sequence[Sequence[Action]], stage_ranks: Sequence[int], costs: Costs) -> Forecast:
    """Return what compute lists of a chain of stages cost. Raises ScheduleError if they wait for each other."""
    walk = _Walk(orders, stage_ranks, costs)
    for rank in range(len(orders)):
        walk.advance(rank)
    for rank, row in enumerate(orders):
        if walk.position[rank] < len(row):
            raise ScheduleError(
                f"rank {rank} never comes to {row[walk.position[rank]]}: what it needs is not made before"
            )
    length = [end - first for end, first in zip(walk.clock, walk.first, strict=True)]
    worst = max(range(len(orders)), key=lambda rank: length[rank])
    makespan = max(walk.clock) - min(walk.first)
    total = len(orders) * makespan
    return Forecast(
        makespan,
        length[worst],
        1.0 - sum(walk.work) / total if total else 0.0,
        (length[worst] - walk.work[worst]) / length[worst] if length[worst] else 0.0,
        tuple(walk.peak),
    )


class _Walk:
    """Runs each rank as far as it comes; a rank that lacks something is called again when that is made."""

    def __init__(self, orders: Sequence[Sequence[Action]], stage_ranks: Sequence[int], costs: Costs) -> None:
        num, last = len(orders), len(stage_ranks) - 1
        self.clock, self.first, self.work, self.peak, self._level = ([0.0] * num for _ in range(5))
        self.position = [0] * num
        self._orders, self._stage_ranks, self._last = orders, stage_ranks, last
        self._times = {
            Op.F: costs.forward, Op.B: costs.full_backward, Op.I: costs.input_grad, Op.W: costs.weight_grad
        }  # fmt: skip
        self._held = {Op.F: 1.0, Op.B: -1.0, Op.I: costs.kept - 1.0, Op.W: -costs.kept}
        self._hop = [costs.hop if s and stage_ranks[s] != stage_ranks[s - 1] else 0.0 for s in range(last + 1)]
        self._made: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, chunk) → when its neighbour has it
        self._waiting: dict[tuple[bool, int, int], int] = {}  # the same → rank that lacks it

    def advance(self, rank: int) -> None:
        """Run `rank` until it lacks something, and then those whom it kept waiting."""
        ready = [rank]
        while ready:
            self._run(ready.pop(), ready)

    def _run(self, rank: int, ready: list[int]) -> None:
        row, made, waiting, last = self._orders[rank], self._made, self._waiting, self._last
        at, now, held, busy = self.position[rank], self.clock[rank], self._level[rank], self.work[rank]
        while at < len(row):
            op, stage, chunk, _ = row[at]
            start = now
            if op is Op.F and stage:
                needs = (True, stage - 1, chunk)
            elif op is not Op.F and op is not Op.W and stage < last:
                needs = (False, stage + 1, chunk)
            else:
                needs = None
            if needs is not None:
                found = made.get(needs)
                if found is None:
                    waiting[needs] = rank
                    break
                start = max(now, found)
            if not at:
                self.first[rank] = start
            took = self._times[op][stage]
            now = start + took
            busy += took
            held += self._held[op]
            self.peak[rank] = max(self.peak[rank], held)
            if op is not Op.W:
                makes = (op is Op.F, stage, chunk)
                made[makes] = now + (self._hop[min(stage + 1, last)] if op is Op.F else self._hop[stage])
                if makes in waiting:
                    ready.append(waiting.pop(makes))
            at += 1
        self.position[rank], self.clock[rank], self._level[rank], self.work[rank] = at, now, held, busy
