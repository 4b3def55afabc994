"""Where to cut a chain of operations so that the slowest stage is as fast as possible. Exact, pure.

A cut before node i costs both of its sides `crossing[i]`: a stage's time is the sum of its nodes plus what it
receives and sends. graph.cut supplies the numbers and turns the positions into stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stagekit.errors import SplitError


@dataclass(frozen=True, slots=True)
class Partition:
    """`begins`: index of each stage's first node, the first is 0. Times in the unit of the costs."""

    begins: tuple[int, ...]
    slowest: float
    lower_bound: float  # no cut at all can be better: the larger of the mean and the largest indivisible piece


def partition(costs: Sequence[float], crossing: Sequence[float], legal: Sequence[int], stages: int) -> Partition:
    """Cut `costs` into `stages` consecutive stages at positions out of `legal`, minimising the slowest stage.

    `crossing[i]` is charged to the two stages that a cut before node i parts. `legal` ascends within 1..len-1.
    Raises SplitError with both numbers if there are fewer legal cuts than needed.
    """
    if stages < 1:
        raise SplitError(f"{stages} stages: ask for at least 1")
    if stages - 1 > len(legal):
        raise SplitError(
            f"{stages} stages need {stages - 1} cuts, but the model has only {len(legal)} legal ones; use at most {len(legal) + 1} stages"
        )
    prefix = [0.0, *accumulate(costs)]
    positions = [0, *legal, len(costs)]
    charge = [0.0, *(float(crossing[i]) for i in legal), 0.0]
    opens = [prefix[p] - c for p, c in zip(positions, charge, strict=True)]  # a stage [i, j) takes closes[j] - opens[i]
    closes = [prefix[p] + c for p, c in zip(positions, charge, strict=True)]
    best, parents = _solve(opens, closes, stages)
    begins = [len(positions) - 1]
    for parent in reversed(parents):
        begins.append(parent[begins[-1]])
    pieces = [prefix[b] - prefix[a] for a, b in pairwise(positions)]
    return Partition(
        begins=tuple(positions[k] for k in reversed(begins[1:])),
        slowest=best,
        lower_bound=max(prefix[-1] / stages, max(pieces, default=0.0)),
    )


def _solve(opens: list[float], closes: list[float], stages: int) -> tuple[float, list[list[int]]]:
    """Dynamic programming over the number of stages, O(stages · n log n).

    With one stage more, best[j] = min over i < j of max(before[i], closes[j] - opens[i]). Of all i only those matter
    that no other i beats in both `before` (lower) and `opens` (higher); along these the first term rises and the
    second falls, so the best one lies where they meet.
    """
    num = len(opens)
    infinity = float("inf")
    before = [0.0] + [infinity] * (num - 1)
    parents: list[list[int]] = []
    for _ in range(stages):
        frontier: list[tuple[float, float, int]] = []  # (before, opens, index), both ascending
        after, parent = [infinity] * num, [0] * num
        for j in range(1, num):
            _insert(frontier, (before[j - 1], opens[j - 1], j - 1))
            after[j], parent[j] = _meet(frontier, closes[j])
        parents.append(parent)
        before = after
    return before[num - 1], parents


def _insert(frontier: list[tuple[float, float, int]], point: tuple[float, float, int]) -> None:
    if point[0] == float("inf"):
        return
    at = bisect_left(frontier, point)
    if at > 0 and frontier[at - 1][1] >= point[1]:
        return
    end = at
    while end < len(frontier) and frontier[end][1] <= point[1]:
        end += 1
    frontier[at:end] = [point]


def _meet(frontier: list[tuple[float, float, int]], close: float) -> tuple[float, int]:
    if not frontier:
        return float("inf"), 0
    low, high = 0, len(frontier)
    while low < high:  # the first point whose own `before` dominates
        middle = (low + high) // 2
        if frontier[middle][0] >= close - frontier[middle][1]:
            high = middle
        else:
            low = middle + 1
    candidates = [frontier[k] for k in (low - 1, low) if 0 <= k < len(frontier)]
    return min((max(value, close - opened), index) for value, opened, index in candidates)
