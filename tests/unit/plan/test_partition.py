"""The chain partition: exact against brute force, fast on long chains, loud when there are too few cuts."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from stagekit.errors import SplitError
from stagekit.plan.partition import partition


def slowest_of(costs: list[float], crossing: list[float], begins: tuple[int, ...]) -> float:
    ends = [*begins[1:], len(costs)]
    charge = lambda i: crossing[i] if 0 < i < len(costs) else 0.0  # noqa: E731
    return max(sum(costs[a:b]) + charge(a) + charge(b) for a, b in zip(begins, ends, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_no_other_cut_has_a_faster_slowest_stage(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(1, 9)
    costs = [rng.choice([0.0, 1.0, rng.random() * 5]) for _ in range(num)]
    crossing = [rng.choice([0.0, rng.random() * 4]) for _ in range(num)]
    legal = sorted(rng.sample(range(1, num), rng.randint(0, num - 1)))
    stages = rng.randint(1, len(legal) + 1)
    found = partition(costs, crossing, legal, stages)
    best = min(slowest_of(costs, crossing, (0, *cut)) for cut in itertools.combinations(legal, stages - 1))
    assert found.begins[0] == 0
    assert len(found.begins) == stages
    assert set(found.begins[1:]) <= set(legal)
    assert list(found.begins) == sorted(set(found.begins))
    assert found.slowest == pytest.approx(best)
    assert slowest_of(costs, crossing, found.begins) == pytest.approx(best)
    assert found.lower_bound <= found.slowest + 1e-9


def test_a_cheap_boundary_beats_perfect_balance() -> None:
    found = partition([1.0, 1.0, 1.0, 1.0], [0.0, 0.1, 9.0, 0.1], [1, 2, 3], 2)
    assert found.begins in {(0, 1), (0, 3)}


def test_more_stages_than_legal_cuts_are_refused_with_both_numbers() -> None:
    with pytest.raises(SplitError, match=r"5 stages need 4 cuts.*only 2 legal"):
        partition([1.0] * 6, [0.0] * 6, [2, 4], 5)


def test_five_thousand_nodes_take_less_than_two_seconds() -> None:
    rng = random.Random(0)
    costs = [rng.random() for _ in range(5000)]
    started = time.process_time()
    found = partition(costs, [rng.random() for _ in costs], list(range(1, 5000)), 16)
    assert time.process_time() - started < 2.0
    assert len(found.begins) == 16
