"""Costs fitted to a recorded step are those that made it, and predict other schedules."""

from __future__ import annotations

import pytest

from stagekit.errors import UserError
from stagekit.plan.actions import Action, Op
from stagekit.plan.costs import Costs
from stagekit.plan.fit import Timed, fit_costs
from stagekit.plan.schedules.registry import table_for
from stagekit.plan.transports import Transport
from stagekit.plan.trial import try_schedule

COSTS = Costs((1.0, 2.0, 1.5, 1.0), (2.0, 3.0, 2.5, 3.0), (0.0,) * 4, hop=0.25)


def recorded(schedule, chunks=8):
    """What a run of `schedule` with COSTS would record: each action waits from the end of the one before."""
    timeline = try_schedule(schedule, table_for(schedule, 4, 4), chunks, COSTS, transport=Transport.RENDEZVOUS).timeline
    assert timeline is not None
    rows = [[] for _ in range(4)]
    for span in sorted(timeline.spans, key=lambda span: span.start):
        free = rows[span.rank][-1].end_s if rows[span.rank] else 0.0
        action = Action(Op(span.op), span.stage, span.chunk)
        rows[span.rank].append(Timed(action, span.start, span.end, span.start - free))
    return rows


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_costs_that_made_a_step_are_found_in_it(schedule):
    found = fit_costs([recorded(schedule)], (0, 1, 2, 3))
    assert found.forward == pytest.approx(COSTS.forward) and found.full_backward == pytest.approx(COSTS.full_backward)
    assert found.hop == pytest.approx(COSTS.hop)


def test_costs_of_a_gpipe_step_predict_the_others():
    found = fit_costs([recorded("gpipe")], (0, 1, 2, 3))
    for schedule in ("1f1b", "zb-h1", "eager-1f1b"):
        real = try_schedule(schedule, (0, 1, 2, 3), 16, COSTS).timeline
        told = try_schedule(schedule, (0, 1, 2, 3), 16, found).timeline
        assert told.makespan == pytest.approx(real.makespan)


def test_a_backward_is_parted_by_the_given_shares():
    found = fit_costs([recorded("gpipe")], (0, 1, 2, 3), halves=[(1.0, 0.0), (0.5, 0.6), (0.5, 0.6), (0.5, 0.6)])
    assert found.input_grad == pytest.approx((2.0, 1.5, 1.25, 1.5)) and found.weight_grad[1] == pytest.approx(1.8)


def test_a_stage_that_ran_no_whole_backward_is_named():
    with pytest.raises(UserError, match=r"stage 0 ran no full backward .* such as gpipe"):
        fit_costs([recorded("zb-h1")], (0, 1, 2, 3))


def test_a_consumer_that_found_its_message_there_tells_nothing_of_the_hop():
    rows = recorded("gpipe")
    late = [timed._replace(wait_s=0.03) if timed.wait_s == 0.0 else timed for timed in rows[1]]  # what a look costs
    assert fit_costs([[rows[0], late, *rows[2:]]], (0, 1, 2, 3)).hop == pytest.approx(COSTS.hop)
