"""The verifier refuses every bad list for a reason that is true, names the cell, and never refuses a good one.

What is good is decided by tests.unit.plan.brute_force, which counts actions and runs the lists step by step.
"""

import random
import re

import pytest

from stagekit.errors import ScheduleError
from stagekit.plan.actions import RECVS, SENDS, Action, Op
from stagekit.plan.lowering import lower
from stagekit.plan.routes import Routes
from stagekit.plan.schedules.registry import compute_order
from stagekit.plan.timeline import simulate
from stagekit.plan.transports import Transport
from stagekit.plan.verify import verify
from tests.unit.plan.brute_force import reasons, times
from tests.unit.plan.cases import NAMES, lowered, random_case, rich_routes, table

RANKS = 3
REASONS = {
    "deadlock": "deadlock",
    "is missing": "missing",
    "listed twice": "twice",
    "no such sum": "foreign",
    "there is no": "foreign",
    "is on rank": "foreign",
    "nothing has to go": "foreign",
    "has nothing to sum": "foreign",
    "is I and W at once": "both",
    "comes before": "order",
    "comes after": "order",
    "point of the channel": "channel",
}
CHUNKS = {"forward": 10, "dualpipe-v": 6}


def good(schedule, transport):
    stage_ranks = table(schedule, RANKS)
    routes = rich_routes(schedule, len(stage_ranks), stage_ranks)
    chunks = CHUNKS.get(schedule, 4)
    lists, _, _ = lowered(schedule, RANKS, chunks, transport=transport, routes=routes)
    return [list(row) for row in lists], stage_ranks, chunks, routes


def some(rng, lists, ops=tuple(Op)):
    """Return (rank, position) of one action of `ops`, None if there is none."""
    places = [(rank, i) for rank, row in enumerate(lists) for i, action in enumerate(row) if action.op in ops]
    return rng.choice(places) if places else None


def drop(rng, lists):
    rank, at = some(rng, lists)
    del lists[rank][at]


def duplicate(rng, lists):
    rank, at = some(rng, lists)
    lists[rank].insert(rng.randrange(len(lists[rank]) + 1), lists[rank][at])


def swap(rng, lists):
    rank, i = some(rng, lists)
    j = rng.randrange(len(lists[rank]))
    lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]


def swap_neighbours(rng, lists):
    rank, i = some(rng, lists)
    j = max(i - 1, 0)
    lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]


def move(rng, lists):
    rank, at = some(rng, lists)
    action = lists[rank].pop(at)
    lists[rank].insert(max(0, min(len(lists[rank]), at + rng.randint(-6, 6))), action)


def wrong_chunk(rng, lists):
    rank, at = some(rng, lists)
    lists[rank][at] = lists[rank][at]._replace(chunk=lists[rank][at].chunk + rng.choice((-1, 1, 50)))


def wrong_stage(rng, lists):
    rank, at = some(rng, lists)
    lists[rank][at] = lists[rank][at]._replace(stage=lists[rank][at].stage + rng.choice((-1, 1, 50)))


def other_rank(rng, lists):
    rank, at = some(rng, lists)
    lists[(rank + 1) % RANKS].append(lists[rank].pop(at))


def cross_order(rng, lists):
    """Let two sends, or two receives, of one rank change places."""
    ops = (rng.choice(list(SENDS | RECVS)),)
    first = some(rng, lists, ops)
    if first is not None:
        rank, i = first
        j = rng.choice([j for j, action in enumerate(lists[rank]) if action.op in ops])
        lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]


def missing_transfer(rng, lists):
    """Take a send away, and its receive too: nothing dangles, but the data never comes."""
    rank, at = some(rng, lists, SENDS)
    send = lists[rank].pop(at)
    for row in lists:
        twin = [a for a in row if a.op in RECVS and (a.stage, a.peer, a.chunk) == (send.peer, send.stage, send.chunk)]
        for action in twin:
            if action.op.value[-1] == send.op.value[-1]:
                row.remove(action)


def other_half(rng, lists):
    """Take a backward for a half of one, or the other way round."""
    place = some(rng, lists, (Op.B, Op.I, Op.W))
    if place is not None:
        rank, at = place
        lists[rank][at] = lists[rank][at]._replace(op=rng.choice((Op.B, Op.I, Op.W)))


MUTATIONS = [
    drop,
    duplicate,
    swap,
    swap_neighbours,
    move,
    wrong_chunk,
    wrong_stage,
    other_rank,
    cross_order,
    missing_transfer,
    other_half,
]


def check_mutations(schedule, transport, seeds):
    """Return how many mutated lists were bad and how many good; verifier and brute force agree on each, and on why."""
    bad = fine = 0
    lists, stage_ranks, chunks, routes = good(schedule, transport)
    for seed in seeds:
        mutate = MUTATIONS[seed % len(MUTATIONS)]
        mutated = [row[:] for row in lists]
        mutate(random.Random(seed), mutated)
        why = reasons(mutated, stage_ranks, chunks, routes, transport)
        where = f"{schedule} on {transport}, {mutate.__name__} with seed {seed}"
        try:
            verify(mutated, stage_ranks, chunks, routes, transport=transport)
        except ScheduleError as error:
            text = str(error)
            said = next((name for words, name in REASONS.items() if words in text.split("\n")[0]), text)
            assert said in why, f"{where}: the verifier says {text}, true is {why or 'that it is good'}"
            assert "→" in text and "rank   0" in text, where
            bad += 1
        else:
            assert not why, f"{where}: accepted, but {why}"
            fine += 1
    return bad, fine


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("schedule", NAMES)
def test_mutated_lists_are_refused_exactly_if_they_are_bad(schedule, transport):
    first = 17 * (NAMES.index(schedule) * len(Transport) + list(Transport).index(transport))  # 1,020 in all
    bad, fine = check_mutations(schedule, transport, range(first, first + 17))
    assert bad > 6 and bad + fine == 17


@pytest.mark.soak
@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("schedule", NAMES)
def test_many_mutated_lists_are_refused_exactly_if_they_are_bad(schedule, transport):
    bad, fine = check_mutations(schedule, transport, range(2000, 3100))
    assert bad > 500 and fine > 20


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("schedule", NAMES)
def test_generated_lists_run_on_every_transport_that_they_are_lowered_for(schedule, transport):
    lists, stage_ranks, chunks, routes = good(schedule, transport)
    order = verify(lists, stage_ranks, chunks, routes, transport=transport)
    assert sorted(order) == [(rank, i) for rank, row in enumerate(lists) for i in range(len(row))]
    assert not reasons(lists, stage_ranks, chunks, routes, transport)


def check_random_case(seed):
    schedule, stage_ranks, chunks, routes, window, transport = random_case(random.Random(seed))
    orders = compute_order(schedule, stage_ranks, max(stage_ranks) + 1, chunks)
    real = Transport.RENDEZVOUS if transport is Transport.IMPLICIT else transport
    lists = lower(orders, stage_ranks, routes, window=window, transport=real)
    order = verify(lists, stage_ranks, chunks, routes, transport=transport)
    assert not reasons(lists, stage_ranks, chunks, routes, transport), f"seed {seed}"
    rng = random.Random(seed)
    took = {op: [rng.randint(1, 9) for _ in stage_ranks] for op in (Op.F, Op.B, Op.I, Op.W)}
    costs = {"forward": took[Op.F], "backward": took[Op.B], "input_grad": took[Op.I], "weight_grad": took[Op.W]}
    hop = rng.randint(0, 4)
    spans = simulate(lists, order, stage_ranks, routes, **costs, hop=hop, transport=transport).spans
    simulated = {(span.op, span.stage, span.chunk): span.end for span in spans}
    assert simulated == times(lists, stage_ranks, routes, transport, took, hop), f"seed {seed}"


def test_lists_of_random_tables_routes_and_windows_run_and_take_the_time_that_the_simulator_says():
    for seed in range(80):
        check_random_case(seed)


@pytest.mark.soak
def test_many_lists_of_random_tables_routes_and_windows_run_and_take_the_time_that_the_simulator_says():
    for seed in range(80, 5080):
        check_random_case(seed)


def test_receives_are_posted_before_their_senders_run_out_of_credits():
    """Stage 0 sends to stage 4, frozen, eleven times before rank 1 comes to stage 4: with two ahead, only eight could go."""
    stage_ranks, chain = (2, 2, 0, 1, 1, 3), Routes.chain(6)
    routes = Routes(chain.forward | {(0, 4)}, chain.backward)
    lists = lower(compute_order("bfs", stage_ranks, 4, 11), stage_ranks, routes, window=2)
    verify(lists, stage_ranks, 11, routes)


@pytest.mark.parametrize("window", [0, 1, 3, None])
@pytest.mark.parametrize("schedule", NAMES)
def test_no_receive_window_makes_a_schedule_deadlock(schedule, window):
    for transport in (Transport.RENDEZVOUS, Transport.DIRECTED):
        lists, stage_ranks, routes = lowered(schedule, 3, 6, transport=transport, window=window)
        verify(lists, stage_ranks, 6, routes, transport=transport)


def test_a_deadlock_is_refused_and_its_cycle_named():
    lists, stage_ranks, chunks, routes = good("1f1b", Transport.RENDEZVOUS)
    row = lists[0]  # the first stage runs its backward before it sends what the next stage needs for it
    early = [a for a in row if a.chunk == 0 and a.op in (Op.RECV_B, Op.B)]
    kept = [a for a in row if a not in early]
    at = next(i for i, a in enumerate(kept) if a.op is Op.F) + 1
    lists[0] = kept[:at] + early + kept[at:]
    with pytest.raises(ScheduleError, match=r"deadlock: .* waits for .*0B0") as caught:
        verify(lists, stage_ranks, chunks, routes)
    assert caught.value.cycle[0] in str(caught.value) and len(caught.value.cycle) > 3


def test_hoisted_receives_deadlock_where_both_directions_share_a_queue():
    lists, stage_ranks, routes = lowered("1f1b", 4, 8)
    with pytest.raises(ScheduleError, match="ordered transport") as caught:
        verify(lists, stage_ranks, 8, routes, transport=Transport.ORDERED)
    assert any(name.startswith("the arrival of") for name in caught.value.cycle)


def test_a_v_deadlocks_on_a_queue_per_direction_unless_it_is_lowered_for_it():
    lists, stage_ranks, routes = lowered("zb-v", 4, 8)
    with pytest.raises(ScheduleError, match="directed transport"):
        verify(lists, stage_ranks, 8, routes, transport=Transport.DIRECTED)
    lists, stage_ranks, routes = lowered("zb-v", 4, 8, transport=Transport.DIRECTED)
    verify(lists, stage_ranks, 8, routes, transport=Transport.DIRECTED)


def test_a_ninth_send_waits_for_the_first_to_arrive():
    """Rank 0 sends nine times before it runs what frees the first receive; with eight it would be fine."""
    routes = Routes(frozenset({(0, 1), (1, 2)}), frozenset())
    forwards = [Action(Op.F, 1, chunk) for chunk in range(9)]
    sends = [Action(Op.SEND_F, 1, chunk, 2) for chunk in range(9)]
    producer = [Action(Op.F, 0, chunk) for chunk in range(9)] + forwards + sends
    consumer = [a for chunk in range(9) for a in (Action(Op.RECV_F, 2, chunk, 1), Action(Op.F, 2, chunk))]
    verify([producer, consumer], (0, 0, 1), 9, routes)
    late = [a for a in consumer if a.op is Op.F]
    tied = Routes(routes.forward, routes.backward, ties=((0, 2), (1, 2)))
    sums = [Action(Op.TIE_SUM, 0, 0), Action(Op.TIE_SUM, 1, 1)]
    receives = [a for a in consumer if a.op is Op.RECV_F]
    verify([[*producer, *sums], [*receives, *late, *sums]], (0, 0, 1), 9, tied)
    with pytest.raises(ScheduleError, match="deadlock"):
        verify([[*producer, *sums], [*receives, *late, *reversed(sums)]], (0, 0, 1), 9, tied)


def test_a_gradient_sum_before_the_last_gradient_is_refused():
    lists, stage_ranks, chunks, routes = good("zb-h1", Transport.RENDEZVOUS)
    row = lists[0]
    last = max(i for i, a in enumerate(row) if a.op is Op.W)
    row.insert(last, row.pop(next(i for i, a in enumerate(row) if a.op is Op.REDUCE)))
    with pytest.raises(ScheduleError, match=r"0REDUCE0 comes before 0W3, whose gradient it sums"):
        verify(lists, stage_ranks, chunks, routes)


def test_a_full_backward_beside_its_halves_is_refused():
    lists, stage_ranks, routes = lowered("zb-h1", 2, 2)
    rows = [list(row) for row in lists]
    rows[1].append(Action(Op.B, 1, 0))
    with pytest.raises(ScheduleError, match=r"1B0 and 1I0: a full backward is I and W at once"):
        verify(rows, stage_ranks, 2, routes)


def test_bare_compute_lists_are_verified_on_the_implicit_transport_only():
    orders = [[Action(Op.F, 0, 0)], [Action(Op.F, 1, 0)]]
    routes = Routes.chain(2, train=False)
    assert verify(orders, (0, 1), 1, routes, transport=Transport.IMPLICIT) == ((0, 0), (1, 0))
    with pytest.raises(ScheduleError, match=re.escape("1RECV_F0 is missing")):
        verify(orders, (0, 1), 1, routes)


def test_forward_only_lists_are_refused_where_gradients_have_to_return():
    lists, stage_ranks, routes = lowered("forward", 2, 3)
    verify(lists, stage_ranks, 3, routes)
    with pytest.raises(ScheduleError, match=r"0B0 is missing \(or 0I0 and 0W0\)"):
        verify(lists, stage_ranks, 3, Routes.chain(2))


def test_lowering_refuses_what_is_no_compute_action():
    with pytest.raises(ScheduleError, match="lowering adds the transfers itself"):
        lower([[Action(Op.SEND_F, 0, 0, 1)]], (0,), Routes.chain(1))
