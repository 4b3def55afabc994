"""Compute orders, their lowering and what the simulator says of them."""

import json
from pathlib import Path

import pytest

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action, Op, from_csv, parse_action, to_csv
from stagekit.plan.lowering import Routes, lower, receive_window
from stagekit.plan.schedules import compute_order, placement
from stagekit.plan.timeline import gantt, simulate
from stagekit.plan.verify import verify

GOLDENS = json.loads((Path(__file__).parents[2] / "goldens" / "schedules.json").read_text())


def chain_routes(num_stages, inputs=()):
    pairs = frozenset((stage, stage + 1) for stage in range(num_stages - 1))
    return Routes(pairs, pairs, frozenset(inputs))


def build(schedule, ranks, chunks, *, stages=None, inputs=()):
    stages = stages or ranks
    stage_ranks = placement(stages, ranks)
    routes = chain_routes(stages, inputs)
    orders = compute_order(schedule, stage_ranks, ranks, chunks)
    lists = lower(orders, stage_ranks, routes, window=receive_window(schedule))
    return lists, verify(lists, stage_ranks, chunks, routes), stage_ranks, routes


def timeline(schedule, ranks, chunks, *, forward=1.0, backward=2.0, hop=0.0):
    lists, extension, stage_ranks, routes = build(schedule, ranks, chunks)
    costs = {"forward": [forward] * ranks, "backward": [backward] * ranks}
    return simulate(lists, extension, stage_ranks, routes, hop=hop, **costs)


@pytest.mark.parametrize(
    "cell", [c for c in GOLDENS["cells"] if c["schedule"] == "1F1B"], ids=lambda c: f"p{c['p']}m{c['m']}"
)
def test_1f1b_reproduces_the_published_bubble_rate(cell):
    result = timeline(
        "1f1b", cell["p"], cell["m"], forward=cell["T_F"], backward=cell["T_B"] + cell["T_W"], hop=cell["T_comm"]
    )
    assert round(result.bubble_span, 4) == cell["published"]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_have_the_closed_form_bubble(schedule, ranks, factor):
    chunks = ranks * factor
    assert timeline(schedule, ranks, chunks).bubble == pytest.approx((ranks - 1) / (chunks + ranks - 1))


def test_1f1b_holds_at_most_p_minus_r_chunks_and_gpipe_all():
    assert timeline("1f1b", 4, 8).peak_chunks == (4, 3, 2, 1)
    assert timeline("gpipe", 4, 8).peak_chunks == (8, 8, 8, 8)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (4, 3), (5, 2), (3, 17)])
def test_any_number_of_chunks_makes_a_valid_schedule(schedule, ranks, chunks):
    lists, extension, _, _ = build(schedule, ranks, chunks)
    assert len(extension) == sum(len(row) for row in lists)


def test_gpipe_runs_several_stages_per_rank():
    lists, extension, _, _ = build("gpipe", 2, 3, stages=4)
    assert [str(a) for a in lists[0] if a.op is Op.F] == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2"]
    assert len(extension) == sum(len(row) for row in lists)


def test_1f1b_refuses_several_stages_per_rank_and_says_what_would_do():
    with pytest.raises(ScheduleError, match=r"4 stages on 2 ranks; use gpipe, bfs or interleaved, or 4 ranks"):
        build("1f1b", 2, 3, stages=4)


def test_an_unknown_schedule_names_those_that_exist():
    with pytest.raises(ScheduleError, match="gpipe, 1f1b"):
        compute_order("zigzag", (0, 1), 2, 4)


def test_gradients_accumulate_in_chunk_order_under_both_schedules():
    for schedule in ("gpipe", "1f1b"):
        lists, *_ = build(schedule, 3, 5)
        for row in lists:
            assert [action.chunk for action in row if action.op is Op.B] == list(range(5))


def test_inputs_travel_before_anything_else():
    lists, *_ = build("1f1b", 3, 4, inputs=[(0, 2)])
    assert str(lists[0][0]) == "0SEND_X0>2"
    assert str(lists[2][0]) == "2RECV_X0>0"


def test_receives_are_posted_one_compute_action_ahead_in_1f1b_and_all_at_once_in_gpipe():
    lists, *_ = build("1f1b", 2, 4)
    row = [str(action) for action in lists[1]]
    assert row.index("1RECV_F1") < row.index("1B0") < row.index("1F1")
    lists, *_ = build("gpipe", 2, 4)
    assert [str(action) for action in lists[1][:4]] == [f"1RECV_F{chunk}" for chunk in range(4)]


def test_lists_survive_their_text_form():
    lists, *_ = build("1f1b", 4, 6, inputs=[(0, 3)])
    assert from_csv(to_csv(lists)) == lists


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Op.F, 2, 0)),
        ("3SEND_F1", Action(Op.SEND_F, 3, 1, 4)),
        ("3RECV_F1", Action(Op.RECV_F, 3, 1, 2)),
        ("0SEND_F2>3", Action(Op.SEND_F, 0, 2, 3)),
        ("12B45", Action(Op.B, 12, 45)),
    ],
)
def test_actions_read_as_torch_writes_them(text, action):
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 1", "-1F0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="no action"):
        parse_action(text)


def test_the_gantt_has_a_line_per_rank_and_shows_bubbles():
    picture = gantt(timeline("1f1b", 4, 4).spans, width=40).splitlines()
    assert len(picture) == 4
    assert picture[3].startswith("rank  3 │·")
    assert "a" in picture[0] and "3" in picture[0]
