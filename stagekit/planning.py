"""Chooses what a user left to us: puts the measured capture and the planner together.

What can be chosen, and how candidates are priced and ranked, is stagekit.plan.planner's; costs are graph.cut's. Called by
stagekit.api for `schedule="auto"` and its relatives, and by stagekit.describe for what `pipectl plan` compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stagekit.errors import SplitError, UserError
from stagekit.graph.buckets.rule import BucketRule
from stagekit.graph.capture.capture import Captured
from stagekit.graph.cut.chain import chain_of
from stagekit.graph.cut.choose import Choice, at_speeds, block_begins, choose
from stagekit.graph.cut.costs import Cost, node_costs
from stagekit.graph.cut.cut import Cut
from stagekit.graph.cut.footprint import footprint
from stagekit.graph.cut.layout import Layout, lay_out
from stagekit.plan.costs import Costs, Link
from stagekit.plan.decision import Decision
from stagekit.plan.memory import in_units
from stagekit.plan.plan import Plan, check_counts, check_per_rank, make_plan
from stagekit.plan.planner.candidates import AUTO, Wish, chunk_counts, schedules_for, stages_per_rank_up_to
from stagekit.plan.planner.chain import Chain, Setting, bound_of
from stagekit.plan.planner.search import Begins, Ranking, priced_plan, rank_plans
from stagekit.plan.schedules.registry import is_file, ranks_for
from stagekit.plan.split import Balanced, Usage, parse_split

_RATIOS_ONLY = Link(0.0, float("inf"), 0.0)  # counted costs say nothing of seconds


def open_ranks(
    schedule: str, stages: int | None, stages_per_rank: int | Sequence[int] | str, ranks: int | None
) -> int | None:
    """Return the ranks of a pipeline of which something is left to choose; None: everything is given.

    Raises UserError for counts that leave the number of ranks open, or say it twice.
    """
    for name, count in (("stages", stages), ("ranks", ranks)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UserError(f"{name} is {count!r}; give a whole number of at least 1")
    if stages_per_rank == AUTO:
        if ranks is None or stages is not None:
            raise UserError(
                f'stages_per_rank="auto" chooses how many stages each rank has: give ranks, not stages (stages is {stages!r}, '
                f"ranks is {ranks!r})"
            )
        return ranks
    if stages is None or ranks is not None:
        raise UserError(
            f'give stages, or ranks together with stages_per_rank="auto" (stages is {stages!r}, ranks is {ranks!r})'
        )
    if schedule != AUTO:
        return None
    if not isinstance(stages_per_rank, int) or isinstance(stages_per_rank, bool) or stages_per_rank < 1:
        raise UserError(f'stages_per_rank is {stages_per_rank!r}; schedule="auto" takes a whole number, or "auto"')
    return check_counts(stages, stages_per_rank, 1)


@dataclass(frozen=True, slots=True)
class Question:
    """How to cut and run, as a user asked: `AUTO` and several chunk counts leave a choice.

    `example_chunks`: of how many chunks the capture's example is one, by default as many as there will be. `tables`: see
    `schedules_for`.
    """

    split: str | Sequence[str] | Balanced
    stages: int | None
    ranks: int | None
    schedule: str = AUTO
    stages_per_rank: int | Sequence[int] | str = 1
    chunks: int | Sequence[int] = 1
    recompute: bool = False
    compiled: bool = False
    tables: str = "any"
    example_chunks: int | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunk counts to compare."""
        return (self.chunks,) if isinstance(self.chunks, int) else tuple(self.chunks)

    @property
    def is_given(self) -> bool:
        """Whether schedule, stages and chunks are given, and at most the cut is not."""
        return AUTO not in (self.schedule, self.stages_per_rank) and len(self.counts) == 1

    @property
    def open_on(self) -> int | None:
        """Ranks of a pipeline of which something is left to choose; None: nothing is."""
        found = open_ranks(self.schedule, self.stages, self.stages_per_rank, self.ranks)
        if found is None and (len(self.counts) > 1 or self._suits_its_schedule) and self.stages is not None:
            if not isinstance(self.stages_per_rank, int):
                raise UserError(f"stages_per_rank is {self.stages_per_rank!r}; to choose chunks give a whole number")
            return check_counts(self.stages, self.stages_per_rank, 1)
        return found

    @property
    def _suits_its_schedule(self) -> bool:
        """Whether all is given but the cut, and that depends on the schedule: where ranks run several stages."""
        several = isinstance(self.stages_per_rank, int) and self.stages_per_rank > 1
        trains = self.schedule in schedules_for(AUTO)
        return several and trains and _is_balanced(self.split) and _balanced(self.split).costs == "measured"


@dataclass(frozen=True, slots=True)
class Made:
    """A cut and what its plan is made of; `ranking` where something was chosen."""

    cut: Cut
    schedule: str
    num_chunks: int
    stages_per_rank: int | tuple[int, ...]
    costs: Costs | None = None
    window: int | str | None = "measured"
    memory_limit: float | None = None
    ranking: Ranking | None = None
    node_costs: Mapping[str, Cost] = field(
        default_factory=dict
    )  # as measured for the cut, all ranks alike fast; or none

    def plan(self, *, replicas: int, compile: str, recompute: bool, compress: str = "") -> Plan:
        """Schedule the cut. Raises ScheduleError, UserError."""
        return make_plan(
            self.cut.spec,
            schedule=self.schedule,
            num_chunks=self.num_chunks,
            stages_per_rank=self.stages_per_rank,
            replicas=replicas,
            compile=compile,
            recompute=recompute,
            costs=self.costs,
            memory_limit=self.memory_limit,
            window=self.window,
            compress=compress,
        )


def cut_for(
    captured: Captured,
    question: Question,
    *,
    buckets: BucketRule | None,
    decided: Decision | None = None,
    at_nodes: Sequence[str] | None = None,
    measured: bool = True,
) -> Made:
    """Cut `captured` as asked, or as another rank `decided`, or `at_nodes`; choose what is open. Raises SplitError,
    UserError.
    """
    if decided is not None:
        return repeated(captured, decided, buckets=buckets, own_schedule=question.schedule)
    if question.open_on is not None and at_nodes is None and (measured or not question.is_given):
        try:
            return _chosen(captured, question, buckets=buckets, measured=measured)
        except SplitError:
            if not question.is_given:
                raise  # else the same question without a choice is answered, or refused in its own words
    assert question.stages is not None and not isinstance(question.stages_per_rank, str)
    held = check_per_rank(question.schedule, question.stages, question.stages_per_rank, 1)
    usage = Usage(question.schedule, question.counts[0], held, question.recompute)
    choice = choose(
        captured, lay_out(captured), question.split, question.stages, at_nodes, measured=measured, usage=usage
    )
    cut = captured.cut(question.split, question.stages, buckets=buckets, choice=choice)
    known = {} if _balanced(question.split).speeds else choice.costs
    return Made(cut, question.schedule, question.counts[0], held, node_costs=known)


def _chosen(captured: Captured, question: Question, *, buckets: BucketRule | None, measured: bool) -> Made:
    found = answer(captured, question, measured=measured)
    won = found.ranking.winner.candidate
    sized = at_chunks(captured, question.example_chunks or question.counts[0], won.chunks)
    cut = sized.cut(question.split, len(found.choice.begins), buckets=buckets, choice=found.choice)
    ranking = None if question.is_given else found.ranking
    return Made(
        cut,
        won.schedule,
        won.chunks,
        won.stages_per_rank,
        memory_limit=won.memory_limit,
        ranking=ranking,
        node_costs=found.measured,
    )


def repeated(
    captured: Captured,
    decided: Decision,
    *,
    buckets: BucketRule | None,
    own_schedule: str,
    known: Cut | None = None,
) -> Made:
    """Cut `captured` as another rank decided, measuring nothing; `known` is a cut of it that may be the same.

    A schedule that is a file is this rank's own, `own_schedule`; other lists in it make another plan, which the ranks
    compare. Raises UserError where this rank was given another name.
    """
    nodes, schedule = decided.first_nodes, decided.schedule
    if is_file(schedule):
        if Path(own_schedule).name != schedule:
            raise UserError(
                f"rank 0 runs the schedule file {schedule}, this rank was given {own_schedule}; pass the same file on every rank"
            )
        schedule = own_schedule
    if known is None or tuple(stage.first_node for stage in known.spec.stages) != nodes:
        known = captured.cut("balanced", len(nodes), buckets=buckets, at_nodes=nodes)
    return Made(
        known,
        schedule,
        decided.num_chunks,
        decided.stages_per_rank,
        decided.costs,
        decided.window,
        decided.memory_limit,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """The ranking, and the winner's cut with what its operations cost."""

    ranking: Ranking
    choice: Choice
    measured: Mapping[str, Cost]  # at the winner's chunk count, all ranks alike fast; empty: counted


def answer(captured: Captured, question: Question, *, measured: bool = True) -> Answer:
    """Measure `captured` at every chunk count and rank what can be. Raises SplitError where nothing fits.

    Without `measured` costs are counted: the cut and the ranking are then rough.
    """
    ranks, given = question.open_on, question.stages_per_rank
    assert ranks is not None
    subject = _measured(captured, question, ranks, measured=measured)
    per_rank = (given,) if isinstance(given, int) else stages_per_rank_up_to(subject.num_cuts, ranks)
    cuts = None if _is_balanced(question.split) else _cuts(captured, subject.layout, question, ranks, per_rank)
    free = Wish(ranks, schedules_for(question.schedule, tables=question.tables), per_rank, question.counts)
    ranking = rank_plans(subject.chains, free, subject.setting, cuts=cuts)
    won, wish = ranking.winner, _balanced(question.split)
    costs = subject.costs[won.candidate.chunks] if measured else {}
    choice = Choice(won.begins, report(ranking, question, subject.how), costs)
    measured_costs = costs if subject.how == "measured" else {}
    if wish.speeds and measured:
        speeds = [wish.speeds[rank] for rank in won.stage_ranks]
        choice = dataclasses.replace(choice, costs=at_speeds(subject.layout, choice, speeds))
    return Answer(ranking, choice, measured_costs)


def compared(
    captured: Captured, question: Question, plan: Plan, node_costs: Mapping[str, Cost] | None = None
) -> Ranking:
    """Return `plan`, all of whose numbers were given, ranked with what could run on as many ranks instead.

    `node_costs`: as measured when it was cut (`Pipeline.node_costs`); without them they are measured now. Alternatives may
    have other schedules and stages per rank.
    """
    ranks = plan.num_ranks
    subject = _measured(captured, question, ranks, measured=True, known=node_costs)
    positions = [subject.layout.position(stage.first_node) for stage in plan.model.stages]
    begins = (0, *(position for position in positions[1:] if position is not None))
    chosen = priced_plan(subject.chains[plan.num_chunks], plan, begins, subject.setting)
    per_rank = stages_per_rank_up_to(subject.num_cuts, ranks)
    wish = Wish(ranks, schedules_for(AUTO), per_rank, (plan.num_chunks,))
    try:
        cuts = None if _is_balanced(question.split) else _cuts(captured, subject.layout, question, ranks, per_rank)
        others = rank_plans(subject.chains, wish, subject.setting, cuts=cuts)
    except SplitError:
        return Ranking((chosen,), (), bound_of(subject.chains[plan.num_chunks], plan.num_chunks, subject.setting))
    rest = sorted((each for each in others.best if each.orders != chosen.orders), key=lambda each: each.step_s)
    return Ranking((chosen, *rest), others.refused, others.bound_s)


@dataclass(frozen=True, slots=True)
class _Subject:
    """A capture measured: its chain and costs at each chunk count."""

    layout: Layout
    how: str
    num_cuts: int
    costs: Mapping[int, Mapping[str, Cost]]
    chains: Mapping[int, Chain]
    setting: Setting


def _measured(
    captured: Captured,
    question: Question,
    ranks: int,
    *,
    measured: bool,
    known: Mapping[str, Cost] | None = None,
) -> _Subject:
    layout, wish = lay_out(captured), _balanced(question.split)
    how = "flops" if not measured and wish.costs == "measured" else wish.costs
    legal: Sequence[int] = block_begins(layout, 1) if wish.block_boundaries else layout.legal
    costs: dict[int, Mapping[str, Cost]] = {}
    chains: dict[int, Chain] = {}
    with torch.random.fork_rng(devices=[]):
        for chunks in question.counts:
            sized = at_chunks(captured, question.example_chunks or question.counts[0], chunks)
            costs[chunks] = known if known and how == "measured" else node_costs(sized, layout, how)
            held = footprint(sized, layout, optimizer_state=wish.optimizer_state, recompute=question.recompute)
            chains[chunks] = chain_of(sized, layout, costs[chunks], legal=legal, footprint=held)
    setting = Setting(
        ranks,
        wish.speeds or (1.0,) * ranks,
        question.recompute,
        question.compiled,
        Link() if how == "measured" else _RATIOS_ONLY,
        wish.memory_bytes,
    )
    return _Subject(layout, how, len(legal), costs, chains, setting)


def ranks_of(pipeline: Mapping[str, Any]) -> int:
    """Return the ranks of a job file's pipeline; of one whose schedule is a file, where that does not say otherwise."""
    per_rank = pipeline["stages_per_rank"]
    return ranks_for(pipeline["stages"], tuple(per_rank) if isinstance(per_rank, list) else per_rank)


def chunks_to_compare(captured: Captured, given: int, ranks: int) -> tuple[int, ...]:
    """Return chunk counts worth comparing for a batch of which the capture's example is one of `given` chunks.

    Raises UserError for a model whose chunks can't be of other sizes.
    """
    batch = [symbol.example for symbol in captured.symbols.symbols if symbol.is_batch]
    if not batch:
        why = f": {captured.fixed[0].reason}" if captured.fixed else ""
        raise UserError(
            f"chunks: auto needs a model that takes chunks of other sizes than the example's{why}; write a number"
        )
    return chunk_counts(min(batch) * given, ranks)


def at_chunks(captured: Captured, given: int, chunks: int) -> Captured:
    """Return the capture as if its example were one chunk of `chunks` instead of `given`. Raises SplitError if its
    batch dimension can't change so.
    """
    if chunks == given:
        return captured
    batch = [symbol for symbol in captured.symbols.symbols if symbol.is_batch]
    if not batch or any(symbol.example * given % chunks for symbol in batch):
        why = f"; {captured.fixed[0].reason}" if captured.fixed else ""
        raise SplitError(f"chunks can't be chosen: the example has no batch dimension that {chunks} chunks divide{why}")
    return dataclasses.replace(captured, symbols=captured.symbols.with_batch(given, chunks))


def _is_balanced(split: str | Sequence[str] | Balanced) -> bool:
    return isinstance(split, Balanced) or (isinstance(split, str) and isinstance(parse_split(split), Balanced))


def _balanced(split: str | Sequence[str] | Balanced) -> Balanced:
    wish = parse_split(split) if isinstance(split, str) else split
    return wish if isinstance(wish, Balanced) else Balanced()


def _cuts(
    captured: Captured, layout: Layout, question: Question, ranks: int, per_rank: Sequence[int]
) -> dict[int, Begins]:
    """Return where stages begin by a policy that is not balanced, for every number of stages that it makes."""
    found: dict[int, Begins] = {}
    problem = SplitError("there is no number of stages to try")
    for count in per_rank:
        stages = ranks * count
        usage = Usage("gpipe", question.counts[0], count, question.recompute)
        try:
            found[stages] = choose(captured, layout, question.split, stages, None, measured=False, usage=usage).begins
        except SplitError as error:
            problem = error
    if not found:
        raise problem
    return found


def report(ranking: Ranking, question: Question, how: str) -> str:
    """Return in a sentence how the cut was chosen, its memory, and the bound that no plan can beat."""
    won = ranking.winner
    wish = _balanced(question.split)
    words = f"cut for {won.candidate}" if question.is_given else "cut and schedule chosen together"
    words += f" on {'measured costs' if how == 'measured' else how}"
    words += ", at blocks" if wish.block_boundaries else ""
    words += f", speeds {', '.join(f'{speed:g}' for speed in wish.speeds)}" if wish.speeds else ""
    if wish.memory_bytes is not None:
        words += f", fullest rank {in_units(won.peak_bytes)} of {in_units(wish.memory_bytes)}"
    tried = len(ranking.best) + len(ranking.refused)
    chosen = "" if question.is_given else f"{won.candidate} out of {tried}, "
    return (
        f"{words}: {chosen}{won.step_s * 1e3:.3g} ms a step, lower bound {ranking.bound_s * 1e3:.3g} ms, "
        f"gap {100 * ranking.gap(won):.1f} %"
    )
