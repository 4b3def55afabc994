"""The planner: of all candidates, cut for each, the one with the fastest predicted step that fits. Pure.

Memory first: what breaks the cap is dropped before it is timed. All others are forecast, the best few lowered, verified
and simulated with the transport that will run. Called by stagekit.planning, which measures the chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stagekit.errors import ScheduleError, SplitError
from stagekit.plan.actions import COMPUTE, Op
from stagekit.plan.costs import Costs
from stagekit.plan.forecast import forecast
from stagekit.plan.lowering import receive_window
from stagekit.plan.memory import Memory, held_at_most, in_units
from stagekit.plan.partition import partition
from stagekit.plan.plan import Plan
from stagekit.plan.planner.candidates import Candidate, Outcome, Wish
from stagekit.plan.planner.chain import Chain, Setting, bound_of, bytes_of, costs_of
from stagekit.plan.planner.tune import Budget, tuned
from stagekit.plan.schedules.registry import AUTOMATIC, compute_order, is_forward_only, table_for
from stagekit.plan.schedules.tables import Orders
from stagekit.plan.timeline import peak_held
from stagekit.plan.transports import Transport
from stagekit.plan.trial import try_orders

FINALISTS = 6  # are simulated in full
ALIKE = 0.005  # predictions this near are the same; then what holds less memory wins
_NEAR = 1.25  # × the fastest: so far moving cuts may help
Begins = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """`best[0]` wins, the others follow by step time. `refused` are those that can't be, each with its reason.

    `bound_s`: no plan at all can be faster.
    """

    best: tuple[Outcome, ...]
    refused: tuple[Outcome, ...]
    bound_s: float

    @property
    def winner(self) -> Outcome:
        """What to run."""
        return self.best[0]

    def gap(self, outcome: Outcome) -> float:
        """Return how far above the bound an outcome is: 0.1 is 10 %."""
        return outcome.step_s / self.bound_s - 1 if self.bound_s > 0 else 0.0


def rank_plans(
    chains: Mapping[int, Chain],
    wish: Wish,
    setting: Setting,
    *,
    cuts: Mapping[int, Begins] | None = None,
    transport: Transport = Transport.RENDEZVOUS,
) -> Ranking:
    """Return all candidates of `wish`, ranked. `chains` has the costs at each chunk count.

    `cuts`: where stages begin, by number of stages, for a policy that is not balanced. Raises SplitError where nothing
    fits: what is needed at least, or why the last candidate can't be.
    """
    search = _Search(chains, setting, cuts)
    outcomes = [search.outcome(candidate) for candidate in wish.candidates()]
    able = sorted((each for each in outcomes if not each.refusal), key=lambda each: each.step_s)
    outcomes += [search.outcome(candidate) for candidate in wish.searched([each.candidate for each in able])]
    able = _distinct(outcomes)
    refused = [each for each in outcomes if each.refusal]
    if not able:
        raise nothing_fits(refused, setting)
    able = sorted(search.improved(able), key=lambda each: each.step_s)
    finals: list[Outcome] = []
    for each in able[:FINALISTS]:
        final = _simulated(each, transport)
        (refused if final.refusal else finals).append(final)
    if not finals:
        raise nothing_fits(refused, setting)
    fastest = min(each.step_s for each in finals)
    alike = [each for each in finals if each.step_s <= fastest * (1 + ALIKE)]
    winner = min(alike, key=_modesty)
    others = sorted((each for each in finals if each is not winner), key=lambda each: each.step_s)
    trains = not all(map(is_forward_only, wish.schedules))
    bound = min(bound_of(chains[chunks], chunks, setting, trains=trains) for chunks in wish.chunks)
    return Ranking((winner, *others, *able[FINALISTS:]), tuple(refused), bound)


def _distinct(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return those that can be, the fastest first, each cut and list under the first of its names."""
    seen: dict[tuple[Begins, Orders], Outcome] = {}
    for each in outcomes:
        if not each.refusal:
            seen.setdefault((each.begins, each.orders), each)
    return sorted(seen.values(), key=lambda each: each.step_s)


class _Search:
    """Cuts are made once per number of stages, table and kind of backward, and shared by the schedules."""

    def __init__(self, chains: Mapping[int, Chain], setting: Setting, cuts: Mapping[int, Begins] | None) -> None:
        self._chains, self._setting, self._given = chains, setting, cuts
        self._cuts: dict[tuple[int, tuple[int, ...], bool], Begins | SplitError] = {}
        self._near: dict[int, Begins] = {}  # by number of stages: other chunk counts and tables cut much alike

    def outcome(self, candidate: Candidate) -> Outcome:
        """Return what a candidate would take, or why it can't be."""
        setting, chain = self._setting, self._chains[candidate.chunks]
        try:
            stage_ranks = table_for(candidate.schedule, setting.ranks * candidate.stages_per_rank, setting.ranks)
            orders = None if candidate.schedule == AUTOMATIC else orders_of(candidate, stage_ranks)
            halved = orders is None or any(action.op is Op.W for row in orders for action in row)  # zb-auto: mostly
            begins = self._cut(candidate, stage_ranks, halved)
            found = self._priced(candidate, chain, begins, stage_ranks, orders)
            if not self._fits(found):
                found = self._cut_smaller(candidate, chain, found, halved, orders)
        except (ScheduleError, SplitError) as error:
            return Outcome(candidate, refusal=str(error))
        if not self._fits(found):
            need, cap = found.peak_bytes, setting.memory_bytes or 0.0
            told = f"needs {in_units(need)} on rank {found.rank_bytes.index(need)}, the cap is {in_units(cap)}"
            return replace(found, refusal=told, needs_bytes=need, step_s=float("inf"))
        assert found.costs is not None
        seen = forecast(found.orders, stage_ranks, found.costs)
        return replace(found, step_s=seen.makespan, bubble=seen.bubble)

    def improved(self, able: Sequence[Outcome]) -> Iterator[Outcome]:
        """Yield all, those near the fastest with their cuts moved to suit their schedule."""
        budget = Budget()
        for each in able:
            near = self._given is None and each.step_s <= able[0].step_s * _NEAR
            yield tuned(each, self._chains[each.candidate.chunks], self._setting, budget, self._fits) if near else each

    def _priced(
        self, candidate: Candidate, chain: Chain, begins: Begins, stage_ranks: tuple[int, ...], orders: Orders | None
    ) -> Outcome:
        """`orders`: None where they depend on what the stages of this cut cost."""
        costs = costs_of(chain, begins, stage_ranks, self._setting)
        orders = orders_of(candidate, stage_ranks, costs) if orders is None else orders
        held = bytes_of(chain, begins, stage_ranks, orders)
        return Outcome(candidate, begins, stage_ranks, costs, orders, rank_bytes=held)

    def _fits(self, found: Outcome) -> bool:
        return self._setting.memory_bytes is None or found.peak_bytes <= self._setting.memory_bytes

    def _cut(self, candidate: Candidate, stage_ranks: tuple[int, ...], halved: bool) -> Begins:
        if self._given is not None:
            if len(stage_ranks) not in self._given:
                raise SplitError(f"the split makes no {len(stage_ranks)} stages")
            return self._given[len(stage_ranks)]
        key = (candidate.chunks, stage_ranks, halved)
        if key not in self._cuts:
            try:
                self._cuts[key] = self._partition(self._chains[candidate.chunks], stage_ranks, halved, None)
            except SplitError as error:
                self._cuts[key] = error
        found = self._cuts[key]
        if isinstance(found, SplitError):
            raise found
        return found

    def _partition(self, chain: Chain, stage_ranks: tuple[int, ...], halved: bool, memory: Memory | None) -> Begins:
        setting = self._setting
        back = tuple(map(sum, zip(chain.input_grad, chain.weight_grad, strict=True))) if halved else chain.backward
        times = 2 if setting.recompute else 1
        seconds = [times * forward + backward for forward, backward in zip(chain.forward, back, strict=True)]
        found = partition(
            seconds,
            chain.crossing_s,
            chain.legal,
            len(stage_ranks),
            speeds=setting.speeds,
            ranks=stage_ranks,
            memory=memory,
            near=self._near.get(len(stage_ranks)),
            quick=True,
        )
        self._near.setdefault(len(stage_ranks), found.begins)
        return found.begins

    def _cut_smaller(
        self, candidate: Candidate, chain: Chain, found: Outcome, halved: bool, orders: Orders | None
    ) -> Outcome:
        """Cut once more, for memory too: stages get shares of what a rank has; return the first try if that fails."""
        cap, footprint = self._setting.memory_bytes, chain.footprint
        if self._given is not None or cap is None or footprint is None:
            return found
        flying = held_at_most(found.orders, len(found.stage_ranks))
        memory = Memory(footprint.held, flying, cap / candidate.stages_per_rank, footprint.workspace_bytes)
        try:
            begins = self._partition(chain, found.stage_ranks, halved, memory)
        except SplitError:
            return found
        tighter = self._priced(candidate, chain, begins, found.stage_ranks, orders)
        return min(found, tighter, key=lambda each: each.peak_bytes)


def priced_plan(chain: Chain, plan: Plan, begins: Begins, setting: Setting) -> Outcome:
    """Return a plan that is made already as an outcome, at the prices of `chain`."""
    per_rank = plan.stages_per_rank if isinstance(plan.stages_per_rank, int) else max(plan.stages_per_rank)
    told = Candidate(plan.schedule, per_rank, plan.num_chunks, plan.memory_limit)
    orders = tuple(tuple(action for action in row if action.op in COMPUTE) for row in plan.actions)
    costs = costs_of(chain, begins, plan.stage_ranks, setting)
    held = bytes_of(chain, begins, plan.stage_ranks, orders)
    return _simulated(Outcome(told, begins, plan.stage_ranks, costs, orders, rank_bytes=held), Transport.RENDEZVOUS)


def orders_of(candidate: Candidate, stage_ranks: tuple[int, ...], costs: Costs | None = None) -> Orders:
    """Return the compute lists of a candidate; of zb-auto, for `costs`. Raises ScheduleError where it can't run these
    numbers.
    """
    ranks = max(stage_ranks) + 1
    limit = candidate.memory_limit
    return compute_order(candidate.schedule, stage_ranks, ranks, candidate.chunks, costs=costs, memory_limit=limit)


def _simulated(found: Outcome, transport: Transport) -> Outcome:
    assert found.costs is not None
    window = receive_window(found.candidate.schedule)
    trial = try_orders(
        found.orders, found.stage_ranks, found.candidate.chunks, found.costs, transport=transport, window=window
    )
    if trial.timeline is None:
        return replace(found, refusal=f"deadlocks: {' waits for '.join(trial.deadlock)}", step_s=float("inf"))
    return replace(found, step_s=trial.timeline.makespan, bubble=trial.timeline.bubble, timeline=trial.timeline)


def _modesty(found: Outcome) -> tuple[float, int, float]:
    """Order plans that are equally fast: by what they hold, then by how much there is to do one by one."""
    held = found.peak_bytes or max(map(peak_held, found.orders))
    return held, sum(map(len, found.orders)), found.step_s


def nothing_fits(refused: list[Outcome], setting: Setting) -> SplitError:
    """Return the error for a wish that nothing meets: what the most modest candidate needs."""
    by_memory = [each for each in refused if each.needs_bytes]
    if not by_memory:
        return SplitError(f"no schedule can run this: {refused[-1].candidate}: {refused[-1].refusal}")
    least = min(by_memory, key=lambda each: each.needs_bytes)
    return SplitError(
        f"no plan fits the memory cap of {in_units(setting.memory_bytes or 0)} on each of {setting.ranks} ranks: "
        f"{len(by_memory)} were tried, the most modest needs {in_units(least.needs_bytes)} ({least.candidate}); "
        "use more ranks, smaller or fewer chunks, or recompute"
    )
