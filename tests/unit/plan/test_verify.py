"""The verifier refuses every bad list, names the cell, and never a good one."""

import random

import pytest

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Op
from stagekit.plan.lowering import Routes, lower, receive_window
from stagekit.plan.schedules import compute_order, placement
from stagekit.plan.verify import verify

RANKS, CHUNKS = 4, 5


def good(schedule):
    stage_ranks = placement(RANKS, RANKS)
    pairs = frozenset((s, s + 1) for s in range(RANKS - 1))
    skip = frozenset({(0, 3)})  # a value that skips two stages
    routes = Routes(pairs | skip, pairs | skip, frozenset({(0, RANKS - 1)}))
    lists = lower(
        compute_order(schedule, stage_ranks, RANKS, CHUNKS), stage_ranks, routes, window=receive_window(schedule)
    )
    return [list(row) for row in lists], stage_ranks, routes


def check(lists, stage_ranks, routes):
    return verify(lists, stage_ranks, CHUNKS, routes)


def drop(rng, lists):
    rank = rng.randrange(RANKS)
    del lists[rank][rng.randrange(len(lists[rank]))]


def duplicate(rng, lists):
    rank = rng.randrange(RANKS)
    lists[rank].insert(rng.randrange(len(lists[rank])), rng.choice(lists[rank]))


def wrong_chunk(rng, lists):
    rank = rng.randrange(RANKS)
    at = rng.randrange(len(lists[rank]))
    action = lists[rank][at]
    lists[rank][at] = type(action)(action.op, action.stage, action.chunk + CHUNKS, action.peer)


def other_rank(rng, lists):
    source, target = rng.sample(range(RANKS), 2)
    lists[target].append(lists[source].pop(rng.randrange(len(lists[source]))))


def late_receive(rng, lists):
    rank = rng.randrange(RANKS)
    at = rng.choice([i for i, a in enumerate(lists[rank]) if a.op in (Op.RECV_F, Op.RECV_B)])
    lists[rank].append(lists[rank].pop(at))


def early_send(rng, lists):
    rank = rng.randrange(RANKS)
    at = rng.choice([i for i, a in enumerate(lists[rank]) if a.op in (Op.SEND_F, Op.SEND_B)])
    lists[rank].insert(0, lists[rank].pop(at))


def cross_order(rng, lists):
    """Swap two sends of one channel: the other end expects them in the order as before."""
    rank = rng.randrange(RANKS - 1)
    at = [i for i, a in enumerate(lists[rank]) if a.op is Op.SEND_F and a.peer == rank + 1]
    i, j = rng.sample(at, 2)
    lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]


MUTATIONS = [drop, duplicate, wrong_chunk, other_rank, late_receive, early_send, cross_order]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_generated_lists_are_accepted(schedule):
    lists, stage_ranks, routes = good(schedule)
    order = check(lists, stage_ranks, routes)
    assert sorted(order) == [(rank, i) for rank, row in enumerate(lists) for i in range(len(row))]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_mutation_is_refused_with_the_grid_and_an_arrow(schedule, mutate):
    for seed in range(40):
        lists, stage_ranks, routes = good(schedule)
        mutate(random.Random(seed), lists)
        with pytest.raises(ScheduleError, match="rank   0") as caught:
            check(lists, stage_ranks, routes)
        assert "→" in str(caught.value), f"seed {seed}"


def test_a_deadlock_is_refused_and_its_cycle_named():
    lists, stage_ranks, routes = good("1f1b")
    row = lists[0]  # the first stage runs its backward before it sends what the next stage needs for it
    early = [a for a in row if a.chunk == 0 and a.op in (Op.RECV_B, Op.B)]
    kept = [a for a in row if a not in early]
    at = next(i for i, a in enumerate(kept) if a.op is Op.F) + 1
    lists[0] = kept[:at] + early + kept[at:]
    with pytest.raises(ScheduleError, match=r"deadlock: .* waits for .*0B0"):
        check(lists, stage_ranks, routes)
