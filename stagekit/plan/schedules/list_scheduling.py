"""List scheduling: run every rank of a chain in simulated time; whoever is free decides what to start.

What comes out always ends: an action is listed when it starts, after what it needs. The decision is the subclass's:
stagekit.plan.schedules.automatic by preference, v_half by a given order with W where there is a gap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from stagekit.plan.actions import Action, Op
from stagekit.plan.costs import Costs
from stagekit.plan.schedules.tables import Orders, stages_of

UNKNOWN = float("inf")
Wakes = list[tuple[float, int]]  # (time, rank) when a rank should decide again


class Rank:
    """One rank as it runs."""

    def __init__(self, stages: list[int]) -> None:
        self.stages = stages
        self.row: list[Action] = []
        self.clock = self.idle = self.held = 0.0  # end of its last action, idle time since its first, activations
        self.in_flight = 0  # forwards without their I
        self.waiting: deque[tuple[int, int]] = deque()  # (stage, chunk) whose W is left


class Run(ABC):
    """All ranks of a chain; when what is listed is ready for the next stage."""

    def __init__(self, stage_ranks: Sequence[int], num_ranks: int, num_chunks: int, costs: Costs) -> None:
        self.ranks = [Rank(stages_of(rank, stage_ranks)) for rank in range(num_ranks)]
        self.costs, self.num_chunks = costs, num_chunks
        self._stage_ranks, self._last = stage_ranks, len(stage_ranks) - 1
        stages = range(len(stage_ranks))
        self._hop = [costs.hop if s and stage_ranks[s] != stage_ranks[s - 1] else 0.0 for s in stages]  # into stage s
        self.forward_ready = [[UNKNOWN if s else 0.0] * num_chunks for s in stages]
        self.backward_ready = [[UNKNOWN] * num_chunks for _ in stages]
        self.next_forward, self.next_backward = [0 for _ in stages], [0 for _ in stages]

    @abstractmethod
    def decide(self, number: int, now: float) -> Wakes:
        """Start what rank `number` should do at `now`, or say when it should be asked again (never: it is woken)."""

    def run(self, *, idle_limit: float = UNKNOWN) -> Orders | None:
        """Return the lists; None once a rank was idle for longer than `idle_limit` after its first action."""
        queue: Wakes = [(0.0, number) for number in range(len(self.ranks))]
        while queue:
            now, number = heappop(queue)
            rank = self.ranks[number]
            if now < rank.clock:
                continue  # it is busy, and will be asked when it is not
            if rank.idle > idle_limit:
                return None
            for wake in self.decide(number, now):
                heappush(queue, wake)
        return tuple(tuple(rank.row) for rank in self.ranks)

    def start(self, number: int, op: Op, stage: int, chunk: int, now: float) -> Wakes:
        """List an action, and return when it and what it makes ready should be looked at."""
        rank, costs = self.ranks[number], self.costs
        if rank.row:
            rank.idle += now - rank.clock
        rank.row.append(Action(op, stage, chunk))
        if op is Op.W:
            rank.held -= costs.kept
            rank.clock = now + costs.weight_grad[stage]
            return [(rank.clock, number)]
        if op is Op.F:
            rank.held += 1
            rank.in_flight += 1
            self.next_forward[stage] += 1
            end = rank.clock = now + costs.forward[stage]
            if stage == self._last:
                self.backward_ready[stage][chunk] = end
                return [(end, number)]
            ready = self.forward_ready[stage + 1][chunk] = end + self._hop[stage + 1]
            return [(end, number), (ready, self._stage_ranks[stage + 1])]
        rank.held -= 1 - costs.kept
        rank.in_flight -= 1
        rank.waiting.append((stage, chunk))
        self.next_backward[stage] += 1
        end = rank.clock = now + costs.input_grad[stage]
        if stage == 0:
            return [(end, number)]
        ready = self.backward_ready[stage - 1][chunk] = end + self._hop[stage]
        return [(end, number), (ready, self._stage_ranks[stage - 1])]
