"""Moves the cuts of a candidate as long as its forecast step gets shorter. Pure; called by stagekit.plan.planner.search.

The partition makes the slowest rank fast; which of many such cuts has the shortest step depends on the schedule, most of
all where ranks run several stages. Lists stay as they are, only the stages' costs change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from stagekit.plan.forecast import forecast
from stagekit.plan.planner.candidates import Outcome
from stagekit.plan.planner.chain import Chain, Setting, bytes_of, costs_of

_JUMPS = (1, -1, 2, -2, 4, -4, 8, -8)
_GAIN = 1 - 1e-3  # costs are measured: less is noise


@dataclass
class Budget:
    """Actions that may still be forecast, over all candidates: about a microsecond each."""

    actions: int = 1_500_000


def tuned(found: Outcome, chain: Chain, setting: Setting, budget: Budget, fits: Callable[[Outcome], bool]) -> Outcome:
    """Return `found` with better cuts, its costs and what its ranks hold; itself where no move helps or pays."""
    size = sum(map(len, found.orders))
    improved = True
    while improved:
        improved = False
        for begins in _moves(found.begins, chain):
            budget.actions -= size
            if budget.actions < 0:
                return found
            moved = _moved(found, begins, chain, setting)
            if moved.step_s < found.step_s * _GAIN and fits(moved):
                found, improved = moved, True
                break
    return found


def _moved(found: Outcome, begins: tuple[int, ...], chain: Chain, setting: Setting) -> Outcome:
    costs = costs_of(chain, begins, found.stage_ranks, setting)
    seen = forecast(found.orders, found.stage_ranks, costs)
    held = bytes_of(chain, begins, found.stage_ranks, found.orders) if chain.footprint else found.rank_bytes
    return replace(found, begins=begins, costs=costs, rank_bytes=held, step_s=seen.makespan, bubble=seen.bubble)


def _moves(begins: tuple[int, ...], chain: Chain) -> Iterator[tuple[int, ...]]:
    """Yield the cuts one step away: one boundary elsewhere, or two of them to the same side."""
    legal = chain.legal
    at = [bisect_left(legal, begin) for begin in begins[1:]]
    for jump in _JUMPS:
        for first in range(len(at)):
            for last in range(first, min(first + 2, len(at))):
                moved = [k + jump if first <= number <= last else k for number, k in enumerate(at)]
                if moved[0] >= 0 and moved[-1] < len(legal) and all(a < b for a, b in pairwise(moved)):
                    yield (0, *(legal[k] for k in moved))
