"""What operators do with nodes, as sentences."""

from __future__ import annotations

import pytest

from piped.core import desired, effects, events
from piped.core.model import AttemptState, FailureReason, JobState, NodeState
from piped.errors import NotFoundError, WrongStateError
from tests.unit.core.build import cluster, registration, submission

CORDON = events.CordonRequested("n1", "ann", "new disk")
UNCORDON = events.UncordonRequested("n1", "ann")
FORGET = events.ForgetRequested("n1", "ann", "burnt")


def drain(within_s=60.0):
    return events.DrainRequested("n1", "ann", "new disk", within_s)


def names(c):
    return [each.record.name for each in c.effects if isinstance(each, effects.WriteRecord)]


def test_a_cordoned_node_keeps_its_work_and_gets_nothing_new_until_it_is_open_again():
    c = cluster(2).feed(submission("j1", name="a", stages=1)).run().feed(CORDON, submission("j2", name="b", stages=1))
    assert (c.job("j1").state, c.job("j2").state) == (JobState.RUNNING, JobState.QUEUED)
    assert c.job("j2").pending_reason == (
        "needs 1 slot, the cluster has 0 (no ready node), 0 in use; no new work for n1 (cordoned by ann: new disk)"
    )
    c.feed(UNCORDON)
    assert c.job("j2").state is JobState.STARTING


def test_flags_survive_a_lost_lease_and_a_new_registration():
    c = cluster(2).feed(CORDON, drain(), events.LeaseExpired("n1", 1), registration("n1"))
    node = c.state.nodes["n1"]
    assert (node.incarnation, node.cordon.why, node.drain.within_s) == (2, "new disk", 60.0)


def test_a_drain_lets_jobs_end_until_its_deadline_and_is_done_when_the_last_has_left():
    c = cluster(2).feed(submission()).run().feed(drain())
    assert effects.ArmDrainDeadline("n1", 1000.0, 60.0) in c.effects
    assert (c.job().state, "node_drained" in names(c)) == (JobState.RUNNING, False)
    c.done(0).exit(0).done(1).exit(1)
    assert (c.job().state, "node_drained" in names(c)) == (JobState.SUCCEEDED, False)
    c.empty()
    assert "node_drained" in names(c)


def test_at_the_deadline_of_a_drain_jobs_are_stopped_with_grace_and_placed_elsewhere():
    c = cluster(2, 2).feed(submission()).run().feed(drain(), events.DrainDeadlinePassed("n1", 1000.0))
    assert (c.job().state, c.attempt().grace_s) == (JobState.PREEMPTING, 5.0)
    assert [each.phase for each in desired.of_node(c.state, "n1")] == [desired.Phase.STOP]
    c.empty()
    assert (c.attempt().state, c.job().state, c.job().aborts) == (AttemptState.PREEMPTED, JobState.STARTING, 0)
    assert c.node_of(0, fence=2) == "n2"


def test_a_job_that_finishes_within_the_grace_has_succeeded():
    c = cluster(2).feed(submission()).run().feed(drain(0.0)).done(0).exit(0).done(1).exit(1).empty()
    assert (c.attempt().state, c.job().state) == (AttemptState.PREEMPTED, JobState.SUCCEEDED)


def test_what_has_not_started_leaves_a_drained_node_at_once_and_is_charged_nothing():
    c = cluster(2, 2).feed(submission(), drain())
    assert (c.attempt().outcome, c.job().state) == (AttemptState.PREEMPTED, JobState.PREEMPTING)
    c.empty()
    assert (c.node_of(0, fence=2), c.job().aborts) == ("n2", 0)


def test_a_job_with_no_other_place_waits_and_names_the_drained_node():
    c = cluster(2).feed(submission()).run().feed(drain(0.0)).empty()
    assert c.job().state is JobState.QUEUED
    assert "no new work for n1 (being drained by ann: new disk)" in c.job().pending_reason


def test_a_drain_that_was_called_off_stops_nothing_at_its_deadline():
    c = cluster(2).feed(submission()).run().feed(drain(), UNCORDON, events.DrainDeadlinePassed("n1", 1000.0))
    assert c.job().state is JobState.RUNNING


def test_a_preempted_job_can_be_cancelled_while_it_stops():
    c = cluster(2).feed(submission()).run().feed(drain(0.0), events.CancelRequested("j1")).empty()
    assert c.job().state is JobState.CANCELLED


def test_after_a_restart_a_drain_has_the_time_that_was_left_whatever_the_clock_says():
    c = cluster(2).feed(drain())
    for now_s, left_s in ((1020.0, 40.0), (5000.0, 0.0), (10.0, 60.0)):
        assert effects.pending(c.state, now_s) == (effects.ArmDrainDeadline("n1", 1000.0, left_s),)


def test_only_a_lost_node_may_be_forgotten():
    with pytest.raises(WrongStateError, match="node n1 is ready, not lost"):
        cluster(2).feed(FORGET)
    with pytest.raises(NotFoundError, match="pipectl get nodes"):
        cluster(2).feed(events.ForgetRequested("n7", "ann", ""))


def test_a_forgotten_node_frees_its_slots_and_its_ranks_are_lost():
    c = cluster(1, 1).feed(submission()).run().feed(events.LeaseExpired("n1", 1))
    assert c.job().state is JobState.RUNNING
    c.feed(FORGET)
    assert c.state.nodes["n1"].state is NodeState.FENCED
    assert dict(c.state.reservations) == {("n2", 0): 1}
    assert c.attempt().state is AttemptState.STOPPING
    c.feed(events.AttemptEmptied("n2", 1))
    assert (c.job().state, c.attempt().state) == (JobState.QUEUED, AttemptState.FAILED)
    assert (c.attempt().verdict.reason, c.attempt().verdict.node_name) == (FailureReason.NODE_LOST, "n1")


def test_a_forgotten_node_that_returns_with_workers_stops_them_before_it_gets_work():
    c = cluster(1).feed(submission(stages=1)).run().feed(events.LeaseExpired("n1", 1), FORGET)
    c.feed(events.CancelRequested("j1"), submission("j2", name="next", stages=1))
    kept = (events.ObservedAttempt(1, is_shim_alive=True, started_ranks=(0,)),)
    c.feed(registration("n1", 1, attempts=kept))
    assert (c.job("j2").state, dict(c.state.reservations)) == (JobState.QUEUED, {("n1", 0): 1})
    assert [each.phase for each in desired.of_node(c.state, "n1")] == [desired.Phase.STOP]
    c.feed(events.AttemptEmptied("n1", 1))
    assert c.job("j2").state is JobState.STARTING


def test_a_second_cordon_gives_the_new_reason_and_the_log_keeps_the_old_one():
    c = cluster(2).feed(events.CordonRequested("n1", "ann", "disk"), events.CordonRequested("n1", "bob", "fans"))
    assert (c.state.nodes["n1"].cordon.who, c.state.nodes["n1"].cordon.why) == ("bob", "fans")
    (told,) = [each.record.reason for each in c.effects if isinstance(each, effects.WriteRecord)]
    assert told == "by bob: fans (before: by ann: disk)"


def test_the_timer_of_a_deadline_that_was_moved_stops_nothing():
    c = cluster(2).feed(submission()).run().feed(drain(60.0))
    old = events.DrainDeadlinePassed("n1", c.now_s)
    c.now_s += 60.0
    c.feed(drain(3600.0), old)
    assert c.job().state is JobState.RUNNING
    c.feed(events.DrainDeadlinePassed("n1", c.now_s))
    assert c.job().state is JobState.PREEMPTING


def test_a_drained_node_says_so_once_however_often_it_is_asked():
    c = cluster(2).feed(drain())
    assert "node_drained" in names(c)
    c.feed(drain(600.0))
    assert "node_drained" not in names(c)


def test_forgetting_a_node_ends_its_drain_and_says_that_nobody_saw_it_empty():
    c = cluster(1).feed(submission(stages=1)).run().feed(drain(), events.LeaseExpired("n1", 1), FORGET)
    told = {each.record.name: each.record.reason for each in c.effects if isinstance(each, effects.WriteRecord)}
    assert told["node_drained"] == "forgotten; whether anything still runs there is not known"


def test_a_preempted_job_starts_nowhere_else_while_a_lost_node_may_still_run_it():
    c = cluster(1).feed(submission(stages=1)).run().feed(events.LeaseExpired("n1", 1), registration("n2", 1))
    c.feed(drain(0.0))
    assert (c.job().state, c.job().attempt) == (JobState.PREEMPTING, 1)
    assert c.job().pending_reason == (
        "waits for n1, which is lost and may still run it: until it reports, or pipectl forget says that it is gone"
    )
    c.feed(FORGET)
    assert (c.job().state, c.node_of(0, fence=2)) == (JobState.STARTING, "n2")


def test_a_lost_node_that_returns_and_reports_empty_lets_its_preempted_job_go_on():
    c = (
        cluster(1)
        .feed(submission(stages=1))
        .run()
        .feed(drain(0.0), events.LeaseExpired("n1", 1), registration("n2", 1))
    )
    kept = (events.ObservedAttempt(1, is_shim_alive=True, started_ranks=(0,)),)
    c.feed(registration("n1", 1, attempts=kept))
    assert (c.job().state, c.job().pending_reason) == (JobState.PREEMPTING, "")
    c.empty(1)
    assert (c.job().state, c.node_of(0, fence=2)) == (JobState.STARTING, "n2")


def test_a_preempted_job_that_waits_for_a_lost_node_can_be_cancelled():
    c = cluster(1).feed(submission(stages=1)).run().feed(events.LeaseExpired("n1", 1), drain(0.0))
    c.feed(events.CancelRequested("j1"))
    assert (c.job().state, c.attempt().state) == (JobState.CANCELLED, AttemptState.PREEMPTED)


def test_a_rank_that_was_never_started_holds_up_no_preempted_job():
    c = cluster(1, 1).feed(submission(stages=1), events.DrainRequested("n1", "ann", "", 60.0))
    assert (c.job().state, c.node_of(0)) == (JobState.PREEMPTING, "n1")
    c.feed(events.LeaseExpired("n1", 1))
    assert (c.job().state, c.node_of(0, fence=2)) == (JobState.STARTING, "n2")


def test_who_drains_a_lost_node_is_told_what_ends_it():
    c = cluster(1).feed(submission(stages=1)).run().feed(events.LeaseExpired("n1", 1), drain())
    told = {each.record.name: each.record.reason for each in c.effects if isinstance(each, effects.WriteRecord)}
    assert told["node_draining"].endswith("n1 is lost: it must come back and report, or pipectl forget ends the drain")


def test_a_forgotten_node_can_not_be_drained():
    c = cluster(1).feed(events.LeaseExpired("n1", 1), FORGET)
    with pytest.raises(WrongStateError, match="node n1 was forgotten: there is nothing to drain"):
        c.feed(drain())
