"""Improve a partition cut by cut: the slowest rank first, then the unevenness of all ranks. Pure; for plan.partition.

Where one stage is one rank, the slowest is best already and only the others become even. Where a rank runs several
stages, their times add up, which no chain partition sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

_SWEEPS = 30
_GAIN = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Search:
    """Stage [i, j) takes closes[j] - opens[i]; stage s runs on rank ranks[s]; earliest[s][j] is its first i."""

    opens: Sequence[float]
    closes: Sequence[float]
    speeds: Sequence[float]  # per rank
    ranks: Sequence[int]  # per stage
    earliest: Sequence[Sequence[int]] | None

    def loads(self, begins: Sequence[int]) -> list[float]:
        """Return the time of each rank."""
        loads = [0.0] * len(self.speeds)
        for stage in range(len(begins) - 1):
            rank = self.ranks[stage]
            loads[rank] += (self.closes[begins[stage + 1]] - self.opens[begins[stage]]) / self.speeds[rank]
        return loads

    def unevenness(self, begins: Sequence[int]) -> float:
        """Return the sum of the squares of the stages' times."""
        return sum((self.closes[end] - self.opens[begin]) ** 2 for begin, end in pairwise(begins))

    def fits(self, stage: int, begin: int, end: int) -> bool:
        """Tell whether stage [begin, end) is allowed."""
        return self.earliest is None or self.earliest[stage][end] <= begin


def exact(search: Search, stages: int) -> Iterator[list[int]]:
    """Yield the best of all cuts, found by trying each, of equals the one of the most even stages; nothing if none fits."""
    last = len(search.opens) - 1
    cuts = ([0, *cut, last] for cut in combinations(range(1, last), stages - 1))
    fitting = (cut for cut in cuts if all(search.fits(s, cut[s], cut[s + 1]) for s in range(stages)))
    best = min(fitting, key=lambda cut: (max(search.loads(cut)), search.unevenness(cut)), default=None)
    if best is not None:
        yield best


def refine(begins: Sequence[int], search: Search) -> tuple[float, list[int]]:
    """Return the slowest rank's time and the better begins (the last entry is the end)."""
    best = list(begins)
    for _ in range(_SWEEPS):
        moved = [_move(best, cut, search) for cut in range(1, len(best) - 1)]
        if not any(moved):
            break
    return max(search.loads(best)), best


def _move(begins: list[int], cut: int, search: Search) -> bool:
    """Put one cut where it is best between its neighbours; tell whether it moved."""
    opens, closes, speeds = search.opens, search.closes, search.speeds
    first, last = begins[cut - 1], begins[cut + 1]
    left, right = search.ranks[cut - 1], search.ranks[cut]
    loads = search.loads(begins)
    others = [load for rank, load in enumerate(loads) if rank not in (left, right)]
    slowest, squares = max(others, default=0.0), sum(load * load for load in others)
    at = begins[cut]
    rest_left = loads[left] - (closes[at] - opens[first]) / speeds[left]
    rest_right = loads[right] - (closes[last] - opens[at]) / speeds[right]

    def score(position: int) -> tuple[float, float]:
        a = (closes[position] - opens[first]) / speeds[left]
        b = (closes[last] - opens[position]) / speeds[right]
        if left == right:
            load = loads[left] + a + b - (closes[at] - opens[first] + closes[last] - opens[at]) / speeds[left]
            return max(slowest, load), squares + load * load
        a, b = a + rest_left, b + rest_right
        return max(slowest, a, b), squares + a * a + b * b

    now = score(at)
    allowed = (p for p in range(first + 1, last) if search.fits(cut - 1, first, p) and search.fits(cut, p, last))
    found, position = min(((score(p), p) for p in allowed), default=(now, at))
    if found[0] * _GAIN < now[0] or (found[0] <= now[0] and found[1] * _GAIN < now[1]):
        begins[cut] = position
        return True
    return False
