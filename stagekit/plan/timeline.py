"""The timeline: when each action of verified lists runs, given what the stages and a hop cost. Pure.

A send costs its rank nothing, a message takes `hop`, and a consumer starts once it has arrived; when it leaves is the
transport's matter, see Note [Arrival] in stagekit.plan.transports. Definitions of cost and bubble: arXiv 2401.10241,
section 5. stagekit.plan.pictures draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagekit.plan.actions import COMPUTE, Action, Op
from stagekit.plan.costs import Costs
from stagekit.plan.dependencies import Cell
from stagekit.plan.network import Network
from stagekit.plan.pictures import Span as Span
from stagekit.plan.pictures import gantt as gantt
from stagekit.plan.routes import Routes
from stagekit.plan.transports import Transport


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a schedule costs.

    `makespan`: first start to last end. `cost`: the longest span of one rank. `bubble`: idle share of
    ranks × makespan. `bubble_span`: (cost − work of a rank) / cost, the paper's definition.
    `peak_chunks[rank]`: most (stage, chunk) activations held at once, from F until B or W.
    `peak_held[rank]`: the same where only a share (`kept`) of one is held between I and W.
    """

    makespan: float
    cost: float
    bubble: float
    bubble_span: float
    peak_chunks: tuple[int, ...]
    spans: tuple[Span, ...]
    peak_held: tuple[float, ...] = ()


def simulate(
    lists: Sequence[Sequence[Action]],
    extension: Sequence[Cell],
    stage_ranks: Sequence[int],
    routes: Routes,
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    input_grad: Sequence[float] | None = None,
    weight_grad: Sequence[float] | None = None,
    hop: float = 0.0,
    transport: Transport = Transport.IMPLICIT,
    kept: float = 1.0,
) -> Timeline:
    """Return the timeline of `lists`, walked in the order of `extension` (from `verify`, for the same transport).

    The costs are per stage; I and W take half of a full backward each where they are not told. `hop` is per transfer
    between two ranks. `kept` is the share of an activation that is held between its I and its W.
    """
    halves = [cost / 2 for cost in backward]
    costs = {Op.F: forward, Op.B: backward, Op.I: input_grad or halves, Op.W: weight_grad or halves}
    trains = any(action.op in COMPUTE and action.op is not Op.F for row in lists for action in row)
    network = Network(stage_ranks, routes, transport, hop, trains=trains)
    clock = [0.0] * len(lists)
    spans: list[Span] = []
    for rank, position in extension:
        action = lists[rank][position]
        op, stage, chunk, peer = action.op, action.stage, action.chunk, action.peer
        if op in COMPUTE:
            start = max(clock[rank], network.ready(op, stage, chunk))
            end = clock[rank] = start + costs[op][stage]
            network.make(op, stage, chunk, end)
            spans.append(Span(rank, op.value, stage, chunk, start, end))
        elif peer is not None:
            clock[rank] = network.post(op, stage, chunk, peer, clock[rank])
    return _summary(spans, lists, kept)


def simulate_at(
    costs: Costs,
    lists: Sequence[Sequence[Action]],
    extension: Sequence[Cell],
    stage_ranks: Sequence[int],
    routes: Routes,
    *,
    transport: Transport,
) -> Timeline:
    """Return the timeline of `lists` at these costs, see `simulate`."""
    return simulate(
        lists,
        extension,
        stage_ranks,
        routes,
        forward=costs.forward,
        backward=costs.full_backward,
        input_grad=costs.input_grad,
        weight_grad=costs.weight_grad,
        hop=costs.hop,
        transport=transport,
        kept=costs.kept,
    )


def peak_held(row: Iterable[Action], kept: float = 1.0) -> float:
    """Return how many (stage, chunk) activations a rank's list holds at most, of which `kept` is left after an I."""
    held = peak = 0.0
    change = {Op.F: 1.0, Op.B: -1.0, Op.I: kept - 1.0, Op.W: -kept}
    for action in row:
        held += change.get(action.op, 0.0)
        peak = max(peak, held)
    return peak


def _summary(spans: list[Span], lists: Sequence[Sequence[Action]], kept: float) -> Timeline:
    work, first, last = ([value] * len(lists) for value in (0.0, float("inf"), 0.0))
    for span in spans:
        work[span.rank] += span.end - span.start
        first[span.rank] = min(first[span.rank], span.start)
        last[span.rank] = max(last[span.rank], span.end)
    length = [max(0.0, b - a) for a, b in zip(first, last, strict=True)]
    makespan = max(last) - min(first) if spans else 0.0
    worst = max(range(len(lists)), key=lambda rank: length[rank], default=0)
    total = len(lists) * makespan
    return Timeline(
        makespan=makespan,
        cost=length[worst] if spans else 0.0,
        bubble=1.0 - sum(work) / total if total else 0.0,
        bubble_span=(length[worst] - work[worst]) / length[worst] if spans and length[worst] else 0.0,
        peak_chunks=tuple(round(peak_held(row)) for row in lists),
        spans=tuple(spans),
        peak_held=tuple(peak_held(row, kept) for row in lists),
    )
