"""Compute orders and their lowering: what each schedule promises, for any numbers that it takes."""

import random

import pytest

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action, Op
from stagekit.plan.costs import Costs
from stagekit.plan.forecast import forecast
from stagekit.plan.lowering import Routes, lower
from stagekit.plan.plan import verified_lists
from stagekit.plan.schedules.registry import NAMES, compute_order, placement, table_for
from stagekit.plan.timeline import peak_held
from stagekit.plan.transports import Channel
from stagekit.plan.trial import try_lists, try_schedule
from stagekit.plan.verify import verify
from tests.unit.plan.cases import TWO_PER_RANK, Transport, lowered, rich_routes, table

V_SHAPED = ("zb-v", "v-half", "dualpipe-v")


def trial(schedule, ranks, chunks, *, stages_per_rank=None, costs=None, **options):
    each = stages_per_rank or (2 if schedule in V_SHAPED else 1)
    stage_ranks = table_for(schedule, ranks * each, ranks)
    return try_schedule(schedule, stage_ranks, chunks, costs or Costs.unit(len(stage_ranks)), **options)


def texts(row, ops=(Op.F, Op.B, Op.I, Op.W)):
    return [str(action) for action in row if action.op in ops]


@pytest.mark.parametrize("schedule", NAMES)
def test_any_number_of_chunks_makes_a_valid_schedule(schedule):
    for ranks, chunks in [(1, 1), (2, 1), (4, 3), (5, 2), (3, 13), (4, 7), (2, 5)]:
        if schedule == "dualpipe-v":
            chunks += 2 * ranks
        lists, stage_ranks, routes = lowered(schedule, ranks, chunks)
        assert len(verify(lists, stage_ranks, chunks, routes)) == sum(len(row) for row in lists)


@pytest.mark.parametrize("schedule", NAMES)
def test_the_same_numbers_make_the_same_lists(schedule):
    assert lowered(schedule, 3, 7) == lowered(schedule, 3, 7)


def numbers(schedule, ranks, chunks, *, stages_per_rank=None, costs=None):
    each = stages_per_rank or (2 if schedule in V_SHAPED else 1)
    stage_ranks = table_for(schedule, ranks * each, ranks)
    orders = compute_order(schedule, stage_ranks, ranks, chunks)
    return forecast(orders, stage_ranks, costs or Costs.unit(len(stage_ranks)))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_known_bubbles_have_their_closed_form(ranks, factor):
    """p ranks, m chunks, no hops: shares of ranks × makespan, or idle units of the longest span."""
    chunks = ranks * factor
    for schedule in ("gpipe", "1f1b", "eager-1f1b"):
        assert numbers(schedule, ranks, chunks).bubble == pytest.approx((ranks - 1) / (chunks + ranks - 1), rel=1e-12)
    for stages in (2, 3):
        for schedule in ("interleaved", "bfs"):
            bubble = numbers(schedule, ranks, chunks, stages_per_rank=stages).bubble
            assert bubble == pytest.approx((ranks - 1) / (stages * chunks + ranks - 1), rel=1e-12)
    costs = Costs((4.0,) * ranks, (5.0,) * ranks, (2.0,) * ranks)
    idle = {
        schedule: numbers(schedule, ranks, chunks, costs=costs).cost - 11 * chunks
        for schedule in ("1f1b", "zb-h1", "zb-h2")
    }
    assert idle["1f1b"] == (ranks - 1) * (4 + 5 + 2)
    assert idle["zb-h1"] == (ranks - 1) * (4 + 5 - 2)
    if factor > 1:  # the warm-up of these alone takes 2p − 1 chunks
        assert idle["zb-h2"] == (ranks - 1) * (4 + 5 - 2 * 2)
        assert numbers("zb-v", ranks, chunks).cost == 6 * chunks
        assert numbers("dualpipe-v", ranks, chunks).cost - 6 * chunks == ranks - 1
        assert numbers("v-half", ranks, chunks).cost - 6 * chunks == (3 * ranks - 5 if ranks > 3 else 2)
    assert numbers("forward", ranks, chunks).cost == chunks


@pytest.mark.parametrize("schedule", NAMES)
def test_the_forecast_says_what_the_timeline_says(schedule):
    for ranks, chunks in ((1, 3), (3, 7), (4, 9)):
        each = 2 if schedule in V_SHAPED else 1
        varied = [tuple(1.0 + 0.1 * ((k * s) % 5) for s in range(ranks * each)) for k in (1, 2, 3)]
        costs = Costs(*varied, hop=0.15, kept=0.4)
        timeline = trial(schedule, ranks, chunks, costs=costs).timeline
        quick = numbers(schedule, ranks, chunks, costs=costs)
        if schedule == "zb-auto":
            quick = forecast(
                compute_order(schedule, placement(ranks, ranks), ranks, chunks, costs=costs), range(ranks), costs
            )
        for name in ("makespan", "cost", "bubble", "bubble_span", "peak_held"):
            assert getattr(quick, name) == pytest.approx(getattr(timeline, name)), name


def test_the_forecast_refuses_lists_that_wait_for_each_other():
    orders = [[Action(Op.F, 0, 0), Action(Op.B, 0, 0), Action(Op.F, 0, 1)], [Action(Op.F, 1, 1), Action(Op.F, 1, 0)]]
    with pytest.raises(ScheduleError, match="rank 0 never comes to 0B0"):
        forecast(orders, (0, 1), Costs.unit(2))


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [
        ("gpipe", (16, 16, 16, 16)),
        ("1f1b", (4, 3, 2, 1)),
        ("eager-1f1b", (7, 5, 3, 1)),
        ("zb-h1", (4, 4, 4, 4)),
        ("zb-h2", (7, 7, 7, 7)),
        ("zb-v", (8, 8, 8, 8)),
        ("v-half", (6, 6, 6, 6)),
        ("dualpipe-v", (9, 9, 9, 9)),
        ("zb-auto", (4, 4, 4, 4)),
    ],
)
def test_each_schedule_holds_the_activations_that_it_says(schedule, peak):
    assert trial(schedule, 4, 16).timeline.peak_chunks == peak


def test_between_i_and_w_only_the_kept_share_is_held():
    costs = Costs((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, kept=0.25)
    assert trial("zb-h1", 4, 8, costs=costs).timeline.peak_held == (4.0, 3.25, 2.5, 1.75)
    assert peak_held([Action(Op.F, 0, 0), Action(Op.F, 0, 1), Action(Op.I, 0, 0), Action(Op.F, 0, 2)], 0.5) == 2.5


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h1", "zb-h2"])
def test_a_rank_runs_consecutive_stages_as_if_they_were_one(schedule):
    lists, stage_ranks, routes = lowered(schedule, 3, 5, stage_ranks=(0, 0, 1, 2, 2, 2))
    verify(lists, stage_ranks, 5, routes)
    assert texts(lists[0])[:2] == ["0F0", "1F0"]
    assert [t for t in texts(lists[2]) if "F" not in t and "W" not in t][:3] in (
        ["5B0", "4B0", "3B0"],
        ["5I0", "4I0", "3I0"],
    )


@pytest.mark.parametrize("schedule", ["gpipe", "bfs", "forward", "zb-auto"])
@pytest.mark.parametrize("stage_ranks", [(0, 1, 0), (0, 1, 1, 0, 2), (2, 1, 0, 1, 2), (0, 1, 2, 0, 1)])
def test_any_table_of_stages_does_where_the_schedule_has_no_shape_of_its_own(schedule, stage_ranks):
    lists, _, routes = lowered(schedule, max(stage_ranks) + 1, 5, stage_ranks=stage_ranks)
    verify(lists, stage_ranks, 5, routes)


@pytest.mark.parametrize(
    ("schedule", "stage_ranks", "chunks", "words"),
    [
        ("1f1b", (0, 1, 0, 1), 3, r"4 stages on 2 ranks; use gpipe, bfs or interleaved, or 4 ranks"),
        ("zb-h1", (1, 0), 3, r"zb-h1 runs one stage per rank"),
        ("interleaved", (0, 1, 0), 4, r"interleaved .* 3 stages on 2 ranks; use 4 stages"),
        ("zb-v", (0, 1, 0, 1), 4, r"zb-v runs two stages per rank.*\[0, 1, 1, 0\], not 4 at \[0, 1, 0, 1\]"),
        ("v-half", (0, 1), 4, r"v-half .* use stages_per_rank: 2"),
        ("dualpipe-v", (0, 1, 1, 0), 3, r"3 chunks are too few, use at least 4, or zb-v"),
        ("gpipe", (0, 1), 0, r"chunks is 0; at least 1 is needed"),
        ("gpipe", (0, 2), 4, r"each of the 3 ranks needs at least one stage"),
        ("zigzag", (0, 1), 4, r'"zigzag" is unknown; there are gpipe, 1f1b, .*zb-auto, or a .csv file'),
    ],
)
def test_a_refusal_says_which_numbers_would_do(schedule, stage_ranks, chunks, words):
    with pytest.raises(ScheduleError, match=words):
        compute_order(schedule, stage_ranks, max(stage_ranks) + 1, chunks)


def test_zb_auto_stays_within_its_memory_limit_and_uses_more_where_it_has_more():
    costs = Costs((1.0,) * 4, (1.1,) * 4, (0.7,) * 4, hop=0.05, kept=0.5)
    spans = []
    for limit in (1, 2, 4, 6, 8):
        timeline = trial("zb-auto", 4, 12, costs=costs, memory_limit=limit).timeline
        assert max(timeline.peak_held) <= limit
        spans.append(timeline.cost)
    assert spans == sorted(spans, reverse=True) and spans[-1] < spans[0]


def test_zb_auto_keeps_any_limit_on_any_table():
    for seed in range(100):
        rng = random.Random(seed)
        ranks, chunks = rng.randint(1, 4), rng.randint(1, 9)
        stage_ranks = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, ranks + 2)))]
        rng.shuffle(stage_ranks)
        times = [tuple(rng.choice((0.0, 0.5, 1.0, rng.uniform(0.1, 2))) for _ in stage_ranks) for _ in range(3)]
        costs = Costs(*times, hop=rng.choice((0, 0.1, 1.5)), kept=rng.choice((0, 0.43, 1.0)))
        most = max(map(stage_ranks.count, range(ranks)))
        limit = rng.choice((most, most + 0.5, 2 * most, 2 * ranks * most))
        orders = compute_order("zb-auto", stage_ranks, ranks, chunks, costs=costs, memory_limit=limit)
        verify(orders, stage_ranks, chunks, Routes.chain(len(stage_ranks)), transport=Transport.IMPLICIT)
        assert max(forecast(orders, stage_ranks, costs).peak_held) <= limit + 1e-9, f"seed {seed}"


def test_zb_auto_refuses_a_limit_below_the_stages_of_a_rank():
    with pytest.raises(ScheduleError, match=r"limit of 1 activations is less than the 2 stages .* at least 2, and 4"):
        compute_order("zb-auto", (0, 1, 0, 1), 2, 4, memory_limit=1)


def test_zb_auto_is_never_worse_than_the_schedules_made_by_hand():
    for costs in (
        Costs((3.0,) * 4, (3.0,) * 4, (1.0,) * 4),
        Costs((2.0, 1.0, 1.0, 2.0), (1.0,) * 4, (2.0,) * 4, hop=0.2),
    ):
        for schedule, limit in (("zb-h1", 4), ("zb-h2", 7), ("1f1b", 4)):
            by_hand = trial(schedule, 4, 12, costs=costs).timeline.cost
            assert trial("zb-auto", 4, 12, costs=costs, memory_limit=limit).timeline.cost <= by_hand + 1e-9


def test_gradients_accumulate_in_chunk_order_under_every_schedule():
    for schedule in NAMES:
        lists, stage_ranks, _ = lowered(schedule, 3, 7)
        for stage, rank in enumerate(stage_ranks):
            chunks = [a.chunk for a in lists[rank] if a.op in (Op.B, Op.W) and a.stage == stage]
            assert chunks == ([] if schedule == "forward" else list(range(7))), schedule


def test_gpipe_runs_several_stages_per_rank_breadth_first():
    lists, *_ = lowered("gpipe", 2, 3, stage_ranks=(0, 1, 0, 1))
    assert texts(lists[0], (Op.F,)) == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2"]


def test_forward_only_goes_round_in_groups_so_that_no_rank_holds_all_chunks():
    lists, *_ = lowered("forward", 2, 4, stage_ranks=(0, 1, 0, 1), routes=Routes.chain(4, train=False))
    assert texts(lists[0]) == ["0F0", "0F1", "2F0", "2F1", "0F2", "0F3", "2F2", "2F3"]


def test_inputs_travel_before_anything_else():
    pairs = Routes.chain(3)
    routes = Routes(pairs.forward, pairs.backward, frozenset({(0, 2)}))
    lists, *_ = lowered("1f1b", 3, 4, routes=routes)
    assert str(lists[0][0]) == "0SEND_X0>2"
    assert str(lists[2][0]) == "2RECV_X0>0"


def test_receives_are_posted_ahead_in_1f1b_and_all_at_once_in_gpipe():
    lists, *_ = lowered("1f1b", 2, 4)
    row = [str(action) for action in lists[1]]
    assert row.index("1RECV_F1") < row.index("1B0") < row.index("1F1")
    lists, *_ = lowered("gpipe", 2, 4)
    assert [str(action) for action in lists[1][:4]] == [f"1RECV_F{chunk}" for chunk in range(4)]


def test_each_channel_may_have_a_window_of_its_own():
    orders = compute_order("1f1b", (0, 1), 2, 4)
    window = {Channel(0, 1, "F"): None, Channel(1, 0, "B"): 0}
    lists = lower(orders, (0, 1), Routes.chain(2), window=window)
    assert [str(action) for action in lists[1][:4]] == [f"1RECV_F{chunk}" for chunk in range(4)]
    row = [str(action) for action in lists[0]]
    assert all(row.index(f"0B{chunk}") == row.index(f"0RECV_B{chunk}") + 1 for chunk in range(4))


def test_windows_that_differ_keep_the_order_of_a_queue_that_channels_share():
    stage_ranks = table("zb-v", 2)
    orders = compute_order("zb-v", stage_ranks, 2, 7)
    windows = {Channel(0, 1, "F"): 0, Channel(0, 1, "B"): None, Channel(1, 0, "F"): 2, Channel(1, 0, "B"): None}
    lists = lower(orders, stage_ranks, Routes.chain(4), window=windows, transport=Transport.DIRECTED)
    verify(lists, stage_ranks, 7, Routes.chain(4), transport=Transport.DIRECTED)


def test_a_receive_is_never_posted_before_one_that_its_sender_sends_earlier():
    """Rank 1 needs stage 3's input first, but rank 0 sends stage 1's first on the same channel."""
    orders = [
        [Action(Op.F, 0, 0), Action(Op.F, 2, 0)],
        [Action(Op.F, 3, 0), Action(Op.F, 1, 0)],
    ]
    routes = Routes(frozenset({(0, 1), (2, 3)}), frozenset())
    lists = lower(orders, placement(4, 2), routes, window=0)
    assert [str(action) for action in lists[1]] == ["1RECV_F0", "3RECV_F0", "3F0", "1F0"]
    verify(lists, placement(4, 2), 1, routes)


def test_input_gradients_are_sent_after_i_and_nothing_after_w():
    lists, *_ = lowered("zb-h1", 2, 2)
    assert [str(a) for a in lists[1] if a.op not in (Op.RECV_F,)] == [
        "1F0", "1I0", "1SEND_B0", "1F1", "1I1", "1SEND_B1", "1W0", "1W1",
    ]  # fmt: skip


def test_stages_of_a_v_hand_over_without_a_transfer_where_it_turns():
    lists, stage_ranks, _ = lowered("zb-v", 2, 4)
    assert stage_ranks == (0, 1, 1, 0) == table("zb-v", 2)
    assert not [a for a in lists[1] if a.op is Op.SEND_F and a.stage == 1]


@pytest.mark.parametrize("schedule", NAMES)
def test_the_lists_of_a_plan_run_by_tag_and_on_a_queue_per_direction(schedule):
    stage_ranks = table(schedule, 3)
    routes = rich_routes(schedule, len(stage_ranks), stage_ranks)
    lists, _ = verified_lists(schedule, stage_ranks, 6, routes)
    for transport in (Transport.RENDEZVOUS, Transport.DIRECTED, Transport.EAGER):
        verify(lists, stage_ranks, 6, routes, transport=transport)


def test_lists_of_the_users_are_lowered_only_if_they_have_no_transfers():
    lists, stage_ranks, _ = lowered("zb-v", 2, 4)
    whole = try_lists(lists, Costs.unit(4), transport=Transport.RENDEZVOUS)
    assert whole.lists == lists and whole.stage_ranks == stage_ranks and whole.num_chunks == 4
    bare = try_lists([[a for a in row if a.op in (Op.F, Op.I, Op.W)] for row in lists], Costs.unit(4))
    assert bare.timeline.makespan == whole.timeline.makespan
    assert any(a.op is Op.SEND_F for row in bare.lists for a in row)


def test_two_per_rank_names_what_the_tables_of_this_test_assume():
    assert set(V_SHAPED) < set(TWO_PER_RANK)
