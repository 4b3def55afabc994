"""The chain partition: exact against brute force, fast on long chains, loud when there are too few cuts."""

from __future__ import annotations

import itertools
import random

import pytest

from stagekit.errors import SplitError
from stagekit.plan.memory import Held, Memory, chunks_in_flight
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


def test_five_thousand_nodes_are_cut_into_sixteen() -> None:
    rng = random.Random(0)
    costs = [rng.random() for _ in range(5000)]
    found = partition(costs, [rng.random() for _ in costs], list(range(1, 5000)), 16)
    assert len(found.begins) == 16


def rank_times(costs: list[float], crossing: list[float], begins: tuple[int, ...], speeds: list[float]) -> list[float]:
    ends = [*begins[1:], len(costs)]
    charge = lambda i: crossing[i] if 0 < i < len(costs) else 0.0  # noqa: E731
    loads = [0.0] * len(speeds)
    for stage, (a, b) in enumerate(zip(begins, ends, strict=True)):
        loads[stage % len(speeds)] += (sum(costs[a:b]) + charge(a) + charge(b)) / speeds[stage % len(speeds)]
    return loads


@pytest.mark.parametrize("seed", range(60))
def test_speeds_and_a_memory_cap_are_solved_exactly(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(3, 9)
    costs = [rng.random() for _ in range(num)]
    crossing = [rng.random() * 0.3 for _ in range(num)]
    legal = sorted(rng.sample(range(1, num), rng.randint(2, num - 1)))
    stages = rng.randint(2, min(4, len(legal) + 1))
    speeds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(stages)]
    held = tuple(
        Held(tuple(sorted(rng.sample(range(num), rng.randint(1, 2)))), rng.randint(0, 9), rng.randint(0, 3))
        for _ in range(6)
    )
    memory = Memory(held, tuple(range(stages, 0, -1)), rng.randint(10, 40), workspace_bytes=2)

    def fits(begins: tuple[int, ...]) -> bool:
        ends = [*begins[1:], num]
        needs = (memory.stage_bytes(k, a, b) for k, (a, b) in enumerate(zip(begins, ends, strict=True)))
        return max(needs) <= memory.cap_bytes

    cuts = [(0, *cut) for cut in itertools.combinations(legal, stages - 1)]
    possible = [cut for cut in cuts if fits(cut)]
    if not possible:
        with pytest.raises(SplitError, match=r"no cut into \d stages fits the memory cap: the best one needs"):
            partition(costs, crossing, legal, stages, speeds=speeds, memory=memory)
        return
    found = partition(costs, crossing, legal, stages, speeds=speeds, memory=memory)
    assert found.begins in possible
    assert found.slowest == pytest.approx(min(max(rank_times(costs, crossing, cut, speeds)) for cut in possible))
    assert found.slowest == pytest.approx(max(rank_times(costs, crossing, found.begins, speeds)))
    assert found.lower_bound <= found.slowest + 1e-9


@pytest.mark.parametrize("ranks", [[0, 1, 0, 1], [0, 1, 1, 0]])
def test_the_stages_of_a_rank_add_up_wherever_the_schedule_puts_them(ranks):
    costs = [1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    found = partition(costs, [0.0] * 8, list(range(1, 8)), 4, speeds=[1.0, 1.0], ranks=ranks)
    loads = [0.0, 0.0]
    for stage, (begin, end) in enumerate(itertools.pairwise([*found.begins, 8])):
        loads[ranks[stage]] += sum(costs[begin:end])
    assert loads == [6.0, 6.0]
    assert found.slowest == 6.0


def test_the_error_of_an_impossible_cap_names_the_stage_and_both_numbers() -> None:
    gib = 1 << 30
    memory = Memory(tuple(Held((i,), gib * size) for i, size in enumerate((1, 5, 1, 1))), (2, 1), 4 * gib)
    with pytest.raises(SplitError, match=r"needs 6 GiB in stage \d with \d chunks in flight, the cap is 4 GiB"):
        partition([1.0] * 4, [0.0] * 4, [1, 2, 3], 2, memory=memory)


def test_a_thing_that_two_stages_touch_is_held_by_both() -> None:
    memory = Memory((Held((0, 3), 10), Held((1,), 4), Held((2,), 4)), (1, 1), 14)
    assert partition([1.0] * 4, [0.0] * 4, [1, 2, 3], 2, memory=memory).begins == (0, 2)
    assert memory.stage_bytes(0, 0, 4) == 18


def test_the_rank_that_is_slowest_counts_not_the_stage() -> None:
    costs = [4.0, 1.0, 1.0, 4.0, 3.0, 3.0, 3.0, 1.0]
    found = partition(costs, [0.0] * 8, list(range(1, 8)), 4, speeds=[1.0, 1.0])
    assert found.slowest == pytest.approx(10.0)
    assert max(rank_times(costs, [0.0] * 8, found.begins, [1.0, 1.0])) == pytest.approx(found.slowest)


@pytest.mark.parametrize("seed", range(10))
def test_several_stages_per_rank_are_solved_exactly_where_cuts_are_few(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.random() for _ in range(12)]
    crossing = [rng.random() * 0.1 for _ in costs]
    found = partition(costs, crossing, list(range(1, 12)), 4, speeds=[1.0, 1.0])
    cuts = ((0, *cut) for cut in itertools.combinations(range(1, 12), 3))
    best = min(max(rank_times(costs, crossing, cut, [1.0, 1.0])) for cut in cuts)
    assert found.lower_bound <= best + 1e-9
    assert found.slowest == pytest.approx(best)


@pytest.mark.parametrize("speeds", [[1.0] * 4, [1.0, 2.0, 1.0, 0.5]])
@pytest.mark.parametrize("loops", [2, 3])
def test_several_stages_per_rank_of_a_long_chain_come_close_to_the_lower_bound(loops: int, speeds: list[float]) -> None:
    rng = random.Random(loops)
    costs = [rng.choice([0.1, 0.3, 1.0, 3.0]) * rng.random() for _ in range(300)]
    crossing = [rng.random() * 0.2 for _ in costs]
    found = partition(costs, crossing, list(range(1, 300)), 4 * loops, speeds=speeds)
    assert found.slowest == pytest.approx(max(rank_times(costs, crossing, found.begins, speeds)))
    assert found.gap < 0.05


def test_stages_that_need_not_be_slow_are_evened_out_too() -> None:
    found = partition([1.0, 1.0, 1.0, 1.0, 9.0], [0.0] * 5, [1, 2, 3, 4], 3)
    assert found.begins == (0, 2, 4)


def test_a_wrong_number_of_speeds_is_refused() -> None:
    with pytest.raises(SplitError, match="give a positive number per rank"):
        partition([1.0] * 4, [0.0] * 4, [1, 2, 3], 4, speeds=[1.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "expected"),
    [("1f1b", 1, (4, 3, 2, 1)), ("gpipe", 1, (6,) * 4), ("gpipe", 2, (6,) * 4)],
)
def test_a_schedule_says_how_many_chunks_each_stage_holds(
    schedule: str, stages_per_rank: int, expected: tuple[int, ...]
) -> None:
    assert chunks_in_flight(schedule, 4, stages_per_rank, 6) == expected


def test_five_thousand_nodes_under_a_cap_stay_below_it() -> None:
    rng = random.Random(0)
    costs = [rng.random() for _ in range(5000)]
    held = tuple(Held((i, min(i + 3, 4999)), 100, 10) for i in range(5000))
    memory = Memory(held, tuple(range(8, 0, -1)), 110_000)
    found = partition(costs, [rng.random() for _ in costs], list(range(1, 5000)), 8, memory=memory)
    ends = [*found.begins[1:], 5000]
    assert all(memory.stage_bytes(k, a, b) <= 110_000 for k, (a, b) in enumerate(zip(found.begins, ends, strict=True)))


@pytest.mark.parametrize(("ranks", "num"), [((0, 0, 0, 1), 2), ((0, 1, 1), 2), ((0, 0, 1, 2, 2), 3)])
def test_ranks_with_unequal_numbers_of_stages_are_balanced_too(ranks: tuple[int, ...], num: int) -> None:
    found = partition([1.0] * 30, [0.0] * 30, list(range(1, 30)), len(ranks), speeds=[1.0] * num, ranks=ranks)
    assert found.gap == 0.0
