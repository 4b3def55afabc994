"""Where to cut a chain of operations so that the slowest rank is as fast as possible. Pure.

A cut before node i costs both of its sides `crossing[i]`: a stage's time is the sum of its nodes plus what it
receives and sends, over the speed of its rank. Exact for one stage per rank, also under a memory cap (plan.memory says
what fits). Several stages per rank add up: exact where few cuts are possible, else the best of several chain partitions,
each improved cut by cut; the gap to a lower bound is told. graph.cut.choose supplies the numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import comb

from stagekit.errors import SplitError
from stagekit.plan.memory import Memory, refuse
from stagekit.plan.refine import Search, exact, refine

INFINITY = float("inf")
_ENUMERATED = 20_000  # so many cuts are simply tried: well under a second
_SHARES = (0.4, 0.6, 0.8)
Point = tuple[float, float, int]  # slowest so far, what opening a stage there saves, index


@dataclass(frozen=True, slots=True)
class Partition:
    """`begins`: index of each stage's first node, the first is 0. Times in the unit of the costs.

    `slowest`: of the ranks; `lower_bound`: no cut at all can be better.
    """

    begins: tuple[int, ...]
    slowest: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """How far above the lower bound the cut is, at most: 0.02 is 2 %."""
        return self.slowest / self.lower_bound - 1 if self.lower_bound > 0 else 0.0


def partition(
    costs: Sequence[float],
    crossing: Sequence[float],
    legal: Sequence[int],
    stages: int,
    *,
    speeds: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
    memory: Memory | None = None,
    near: Sequence[int] | None = None,
    quick: bool = False,
) -> Partition:
    """Cut `costs` into `stages` consecutive stages at positions out of `legal`, minimising the slowest rank.

    `crossing[i]` is charged to the two stages that a cut before node i parts. `legal` ascends within 1..len-1.
    Stage s runs on rank `ranks[s]`, by default s modulo len(`speeds`); a rank of speed 2 takes half the time, and by default
    each stage has a rank of its own. `near`: begins of a good cut for similar costs; where ranks run several stages it is
    improved, instead of many others; `quick`: instead of several cuts with larger and smaller loops only one is.
    Raises SplitError with the numbers if there are fewer legal cuts than needed, or none that fits `memory`.
    """
    speeds = _checked(stages, legal, speeds, ranks)
    prefix = [0.0, *accumulate(costs)]
    bounds = [0, *legal, len(costs)]
    charge = [0.0, *(float(crossing[i]) for i in legal), 0.0]
    opens = [prefix[p] - c for p, c in zip(bounds, charge, strict=True)]  # a stage [i, j) takes closes[j] - opens[i]
    closes = [prefix[p] + c for p, c in zip(bounds, charge, strict=True)]
    earliest = [memory.earliest(stage, bounds) for stage in range(stages)] if memory else None
    ranks = ranks if ranks is not None else [stage % len(speeds) for stage in range(stages)]
    search = Search(opens, closes, speeds, ranks, earliest)
    known = [bisect_left(bounds, begin) for begin in (*near, len(costs))] if near else None
    found = [refine(begins, search) for begins in _starts(search, stages, known, quick)]
    if not found:
        assert memory is not None
        raise refuse(memory, bounds, -(-stages // len(speeds)))
    slowest, begins = min(found)
    largest = max((prefix[b] - prefix[a] for a, b in pairwise(bounds)), default=0.0)
    unavoidable = prefix[-1] + 2 * sum(sorted(charge[1:-1])[: stages - 1])
    return Partition(
        begins=tuple(bounds[k] for k in begins[:-1]),
        slowest=slowest,
        lower_bound=max(unavoidable / sum(speeds), largest / max(speeds)),
    )


def _checked(
    stages: int, legal: Sequence[int], speeds: Sequence[float] | None, ranks: Sequence[int] | None
) -> Sequence[float]:
    if stages < 1:
        raise SplitError(f"{stages} stages: ask for at least 1")
    if stages - 1 > len(legal):
        raise SplitError(
            f"{stages} stages need {stages - 1} cuts, but the model has only {len(legal)} legal ones; use at most {len(legal) + 1} stages"
        )
    speeds = speeds if speeds is not None else [1.0] * stages
    if not speeds or (ranks is None and stages % len(speeds)) or min(speeds) <= 0:
        raise SplitError(f"speeds {list(speeds)}: give a positive number per rank; their count divides {stages} stages")
    return speeds


def _starts(search: Search, stages: int, known: list[int] | None, quick: bool) -> Iterator[list[int]]:
    """Yield cuts that fit: the exact one, and where ranks run several stages those that give some loops a larger share."""
    held = Counter(search.ranks)
    loops = max(held.values())
    if loops > 1 and comb(len(search.opens) - 2, stages - 1) <= _ENUMERATED:
        yield from exact(search, stages)
        return
    if loops > 1 and known and all(search.fits(s, known[s], known[s + 1]) for s in range(stages)):
        yield known
        return
    skews = [[1.0] * loops]
    if loops > 1 and not quick:
        skews += [[1.0 if loop % 2 == odd else share for loop in range(loops)] for odd in (0, 1) for share in _SHARES]
    loop_of = [list(search.ranks[:s]).count(search.ranks[s]) for s in range(stages)]
    for skew in skews:
        # a rank's stages share its time; the factor is 1 where all ranks hold as many
        speeds = [search.speeds[r] * skew[loop_of[s]] * loops / held[r] for s, r in enumerate(search.ranks)]
        begins = _solve(search.opens, search.closes, speeds, search.earliest)
        if begins is not None:
            yield begins


def _solve(
    opens: Sequence[float], closes: Sequence[float], speeds: Sequence[float], earliest: Sequence[Sequence[int]] | None
) -> list[int] | None:
    """Return where stages begin and end, as indices, so that the slowest stage is fastest; None: nothing fits.

    Dynamic programming over the number of stages, O(stages · n log n). With one stage more, best[j] = min over i < j of
    max(before[i], (closes[j] - opens[i]) / speed). Of all i only those matter that no other i beats in both `before`
    (lower) and `opens` (higher); along these the first term rises and the second falls, so the best lies where they meet.
    """
    num = len(opens)
    before = [0.0] + [INFINITY] * (num - 1)
    parents: list[list[int]] = []
    for stage, speed in enumerate(speeds):
        points = [(value, opened / speed, i) for i, (value, opened) in enumerate(zip(before, opens, strict=True))]
        ends = [close / speed for close in closes]
        best = _windowed(points, ends, earliest[stage]) if earliest else _unbounded(points, ends)
        parents.append([index for _, index in best])
        before = [value for value, _ in best]
    if before[-1] == INFINITY:
        return None
    begins = [num - 1]
    for parent in reversed(parents):
        begins.append(parent[begins[-1]])
    return begins[::-1]


def _unbounded(points: Sequence[Point], ends: Sequence[float]) -> list[tuple[float, int]]:
    """Return (slowest, begin) of the best last stage per end j, which may begin anywhere before j."""
    frontier: list[Point] = []
    best = [(INFINITY, 0)]
    for j in range(1, len(points)):
        _insert(frontier, points[j - 1])
        best.append(_meet(frontier, ends[j]))
    return best


def _windowed(points: Sequence[Point], ends: Sequence[float], earliest: Sequence[int]) -> list[tuple[float, int]]:
    """Like `_unbounded`, but a stage that ends at j begins at earliest[j] or later; `earliest` never falls.

    A frontier can't forget a point. So the windows that hold middle - 1 are answered together: their parts before
    the middle grow leftward as j falls, their parts after it grow rightward as j rises.
    """
    best = [(INFINITY, 0)] * len(points)
    middle = 1
    while middle < len(points):
        end = middle
        while end < len(points) and earliest[end] < middle:
            end += 1
        frontier: list[Point] = []
        left = middle
        for j in range(end - 1, middle - 1, -1):
            while left > earliest[j]:
                left -= 1
                _insert(frontier, points[left])
            best[j] = _meet(frontier, ends[j])
        frontier = []
        for j in range(middle + 1, end):
            _insert(frontier, points[j - 1])
            best[j] = min(best[j], _meet(frontier, ends[j]))
        middle = max(end, middle + 1)
    return best


def _insert(frontier: list[Point], point: Point) -> None:
    if point[0] == INFINITY:
        return
    at = bisect_left(frontier, point)
    if at > 0 and frontier[at - 1][1] >= point[1]:
        return
    end = at
    while end < len(frontier) and frontier[end][1] <= point[1]:
        end += 1
    frontier[at:end] = [point]


def _meet(frontier: list[Point], close: float) -> tuple[float, int]:
    if not frontier:
        return INFINITY, 0
    low, high = 0, len(frontier)
    while low < high:  # the first point whose own `before` dominates
        middle = (low + high) // 2
        value, opened, index = frontier[middle]
        if value + opened >= close:
            high = middle
        else:
            low = middle + 1
    best = (INFINITY, 0)
    if low < len(frontier):
        value, opened, index = frontier[low]
        best = (max(value, close - opened), index)
    if low:
        value, opened, index = frontier[low - 1]
        best = min(best, (max(value, close - opened), index))
    return best
