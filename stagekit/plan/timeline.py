"""The timeline: when each action of verified lists runs, given what a stage and a hop cost.

Simulated under the implicit transport: a send costs its rank nothing, data arrives `hop_s` after it was made, and a
consumer starts once it has arrived. Definitions of cost and bubble: arXiv 2401.10241, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagekit.plan.actions import Action, Op
from stagekit.plan.lowering import Routes
from stagekit.plan.verify import Cell


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action on one rank, in the caller's unit of time."""

    rank: int
    op: str
    stage: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a schedule costs.

    `makespan`: first start to last end. `cost`: the longest span of one rank. `bubble`: idle share of
    ranks × makespan. `bubble_span`: (cost − work of a rank) / cost, the paper's definition.
    `peak_chunks[rank]`: most (stage, chunk) activations held at once.
    """

    makespan: float
    cost: float
    bubble: float
    bubble_span: float
    peak_chunks: tuple[int, ...]
    spans: tuple[Span, ...]


def simulate(
    lists: Sequence[Sequence[Action]],
    extension: Sequence[Cell],
    stage_ranks: Sequence[int],
    routes: Routes,
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    hop: float = 0.0,
) -> Timeline:
    """Return the timeline of `lists`, walked in the order of `extension` (from `verify`).

    `forward` and `backward` are per stage, `hop` per transfer between two ranks.
    """
    end: dict[tuple[Op, int, int], float] = {}
    clock = [0.0] * len(lists)
    held, peak = [0] * len(lists), [0] * len(lists)
    spans: list[Span] = []
    for rank, position in extension:
        action = lists[rank][position]
        if action.op is Op.F:
            givers = [(Op.F, source) for source, target in routes.forward if target == action.stage]
            duration = forward[action.stage]
            held[rank] += 1
            peak[rank] = max(peak[rank], held[rank])
        elif action.op is Op.B:
            givers = [(Op.B, target) for source, target in routes.backward if source == action.stage]
            duration = backward[action.stage]
            held[rank] -= 1
        else:
            continue
        ready = [end[op, stage, action.chunk] + (hop if stage_ranks[stage] != rank else 0.0) for op, stage in givers]
        start = max([clock[rank], *ready])
        clock[rank] = end[action.op, action.stage, action.chunk] = start + duration
        spans.append(Span(rank, action.op, action.stage, action.chunk, start, clock[rank]))
    return _summary(spans, len(lists), peak)


def _summary(spans: list[Span], num_ranks: int, peak: list[int]) -> Timeline:
    work = [sum(s.end - s.start for s in spans if s.rank == rank) for rank in range(num_ranks)]
    length = [
        max((s.end for s in spans if s.rank == rank), default=0.0)
        - min((s.start for s in spans if s.rank == rank), default=0.0)
        for rank in range(num_ranks)
    ]
    makespan = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    worst = max(range(num_ranks), key=lambda rank: length[rank])
    total = num_ranks * makespan
    return Timeline(
        makespan=makespan,
        cost=length[worst],
        bubble=1.0 - sum(work) / total if total else 0.0,
        bubble_span=(length[worst] - work[worst]) / length[worst] if length[worst] else 0.0,
        peak_chunks=tuple(peak),
        spans=tuple(spans),
    )


def gantt(spans: Sequence[Span], *, width: int = 96, title: str = "") -> str:
    """Return one line per rank: digits are forwards, letters backwards (chunk modulo 10 or 26), dots are bubbles."""
    if not spans:
        return title
    first, last = min(s.start for s in spans), max(s.end for s in spans)
    scale = width / (last - first) if last > first else 0.0
    lines = [title] if title else []
    for rank in sorted({s.rank for s in spans}):
        row = ["·"] * width
        for span in (s for s in spans if s.rank == rank):
            mark = str(span.chunk % 10) if span.op == Op.F else chr(ord("a") + span.chunk % 26)
            left = min(int((span.start - first) * scale), width - 1)
            right = max(left + 1, int((span.end - first) * scale))
            row[left:right] = [mark] * (min(right, width) - left)
        lines.append(f"rank {rank:>2} │{''.join(row)}│")
    return "\n".join(lines)
