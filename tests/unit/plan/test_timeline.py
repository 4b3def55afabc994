"""The simulator: when things run on each transport, what is held, and how it is drawn."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from stagekit.plan.actions import Action, Op
from stagekit.plan.costs import Costs
from stagekit.plan.pictures import chrome_trace, gantt, svg
from stagekit.plan.routes import Routes
from stagekit.plan.timeline import simulate
from stagekit.plan.transports import Transport
from stagekit.plan.trial import try_lists, try_schedule
from stagekit.plan.verify import verify
from tests.unit.plan.cases import NAMES, lowered, table


def ends(trial):
    return {f"{s.stage}{s.op}{s.chunk}": s.end for s in trial.timeline.spans}


def timed(texts, transport, **costs):
    lists = [[Action(*action) for action in row] for row in texts]
    num_stages = 1 + max(a.stage for row in lists for a in row)
    unit = (1.0,) * num_stages
    return try_lists(lists, Costs(unit, unit, unit, **costs), transport=transport)


def test_costs_are_per_stage_and_action():
    costs = Costs((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), hop=0.5, backward=(10.0, 20.0))
    halves = ends(try_schedule("zb-h1", (0, 1), 1, costs))
    assert halves == {"0F0": 1.0, "1F0": 3.5, "1I0": 7.5, "1W0": 13.5, "0I0": 11.0, "0W0": 16.0}
    full = ends(try_schedule("1f1b", (0, 1), 1, costs))
    assert full == {"0F0": 1.0, "1F0": 3.5, "1B0": 23.5, "0B0": 34.0}


def test_a_full_backward_costs_both_halves_unless_told_and_halves_half_of_it():
    assert ends(try_schedule("gpipe", (0,), 1, Costs((1.0,), (2.0,), (3.0,)))) == {"0F0": 1.0, "0B0": 6.0}
    lists, stage_ranks, routes = lowered("zb-h1", 1, 1)
    timeline = simulate(lists, verify(lists, stage_ranks, 1, routes), stage_ranks, routes, forward=[1], backward=[4])
    assert [span.end - span.start for span in timeline.spans] == [1, 2, 2]


def test_a_late_receive_delays_a_message_where_it_moves_once_both_ends_are_posted():
    lists = [
        [(Op.F, 0, 0), (Op.SEND_F, 0, 0, 1), (Op.F, 0, 1), (Op.SEND_F, 0, 1, 1)],
        [(Op.RECV_F, 1, 0, 0), (Op.F, 1, 0), (Op.RECV_F, 1, 1, 0), (Op.F, 1, 1)],
    ]
    assert ends(timed(lists, Transport.EAGER, hop=0.5))["1F1"] == 3.5
    assert ends(timed(lists, Transport.RENDEZVOUS, hop=0.5))["1F1"] == 4.0  # sent at 2, received from 2.5 on


def test_messages_of_one_queue_arrive_one_after_the_other():
    lists = [
        [(Op.F, 0, 0), (Op.SEND_F, 0, 0, 1), (Op.SEND_F, 0, 0, 2)],
        [(Op.RECV_F, 1, 0, 0), (Op.RECV_F, 2, 0, 0), (Op.RECV_F, 2, 0, 1), (Op.F, 1, 0), (Op.F, 2, 0)],
    ]
    lists[1].remove((Op.RECV_F, 2, 0, 1))
    assert ends(timed(lists, Transport.RENDEZVOUS, hop=2.0)) == {"0F0": 1.0, "1F0": 4.0, "2F0": 5.0}
    assert ends(timed(lists, Transport.DIRECTED, hop=2.0)) == {"0F0": 1.0, "1F0": 4.0, "2F0": 6.0}


def test_a_send_without_credit_waits_until_the_eighth_before_it_arrived():
    forwards = [a for c in range(9) for a in ((Op.F, 0, c), (Op.SEND_F, 0, c, 1))]
    lists = [[*forwards, (Op.F, 0, 9), (Op.SEND_F, 0, 9, 1)], [(Op.RECV_F, 1, c, 0) for c in range(10)]]
    lists[1] = [(Op.F, 2, c) for c in range(10)] + lists[1] + [(Op.F, 1, c) for c in range(10)]
    routes = Routes(frozenset({(0, 1)}), frozenset())
    rows = [[Action(*a) for a in row] for row in lists]
    order = verify(rows, (0, 1, 1), 10, routes)
    times = {"forward": [1.0, 1.0, 2.0], "backward": [0.0] * 3, "hop": 0.5, "transport": Transport.RENDEZVOUS}
    spans = simulate(rows, order, (0, 1, 1), routes, **times).spans
    assert [s.end for s in spans if s.stage == 0][-3:] == [8.0, 9.0, 21.5]  # received at 20, arrived at 20.5


@pytest.mark.parametrize("schedule", NAMES)
def test_no_transport_is_faster_than_none(schedule):
    stage_ranks = table(schedule, 3)
    costs = Costs(*((time,) * len(stage_ranks) for time in (1.0, 1.1, 0.9)), hop=0.2)
    spans = {t: try_schedule(schedule, stage_ranks, 6, costs, transport=t).timeline.makespan for t in Transport}
    assert spans[Transport.IMPLICIT] <= spans[Transport.EAGER] + 1e-9
    assert spans[Transport.EAGER] <= spans[Transport.RENDEZVOUS] + 1e-9
    assert spans[Transport.RENDEZVOUS] <= min(spans[Transport.DIRECTED], spans[Transport.ORDERED]) + 1e-9


def test_posting_receives_one_action_early_hides_the_hop_that_posting_at_use_shows():
    """p = 8, m = 32, a hop of 10 % of F, rendezvous."""
    costs = Costs((1.0,) * 16, (1.0,) * 16, (1.0,) * 16, hop=0.1)
    bubbles = [
        try_schedule("interleaved", table("interleaved", 8), 32, costs, transport=Transport.RENDEZVOUS, window=w)
        for w in (0, 1, None)
    ]
    late, early, first = (trial.timeline.bubble for trial in bubbles)
    assert late > early + 0.03 and early == first


def test_a_deadlock_is_a_result_that_names_its_cycle():
    lists, *_ = lowered("1f1b", 4, 8)
    trial = try_lists(lists, Costs.unit(4), transport=Transport.ORDERED)
    assert trial.timeline is None
    assert trial.deadlock and "rank   0" in trial.refusal


def spans_of(schedule="zb-h1"):
    return try_schedule(schedule, table(schedule, 4), 4, Costs.unit(len(table(schedule, 4)))).timeline.spans


def test_the_gantt_has_a_line_per_rank_and_shows_bubbles_and_halves():
    picture = gantt(spans_of(), width=40, title="four").splitlines()
    assert picture[0] == "four" and len(picture) == 5
    assert picture[4].startswith("rank  3 │·")
    assert "a" in picture[1] and "A" in picture[1] and "3" in picture[1]
    assert gantt((), title="nothing") == "nothing"


def test_the_svg_is_one_document_with_a_box_and_a_name_per_action():
    root = ElementTree.fromstring(svg(spans_of(), title="a < b"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}rect")) == len(spans_of())
    assert "0W3: " in {t.text.split(" ")[0] + " " for t in root.findall(f".//{space}title")}
    assert ElementTree.fromstring(svg(())) is not None


def test_the_chrome_trace_has_an_event_per_action():
    events = json.loads(chrome_trace(spans_of()))["traceEvents"]
    done = [event for event in events if event["ph"] == "X"]
    assert len(done) == len(spans_of()) and {event["pid"] for event in done} == {0, 1, 2, 3}
    assert all(event["dur"] > 0 and event["name"] for event in done)
