"""The life of jobs and attempts as sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piped.core import attempts, desired, effects, events, jobs, nodes
from piped.core.model import AttemptState, FailureReason, JobState, NodeState, WorkerState
from piped.errors import ConflictError, IllegalTransition, NotFoundError, RegistrationRefused, StoreRolledBack
from tests.unit.core.build import Cluster, cluster, registration, submission


def phases(cluster_, node_id="n1"):
    return [each.phase for each in desired.of_node(cluster_.state, node_id)]


def test_a_job_goes_from_queued_to_succeeded_and_frees_its_slots():
    c = cluster(2).feed(submission())
    assert (c.job().state, c.attempt().state) == (JobState.STARTING, AttemptState.PREPARING)
    assert effects.SendDesired("n1") in c.effects
    assert phases(c) == [desired.Phase.PREPARE]
    c.prepare()
    assert c.attempt().state is AttemptState.COMMITTED
    assert phases(c) == [desired.Phase.RUN]
    c.join()
    assert (c.job().state, c.job().started_s) == (JobState.RUNNING, 1000.0)
    c.done(0).exit(0).done(1).exit(1)
    assert (c.job().state, c.attempt().state) == (JobState.SUCCEEDED, AttemptState.STOPPING)
    assert phases(c) == [desired.Phase.STOP]
    c.empty()
    assert c.attempt().state is AttemptState.SUCCEEDED
    assert not c.state.reservations
    assert phases(c) == []


def test_exit_0_without_done_is_a_failure():
    c = cluster(2).feed(submission()).run().exit(0)
    assert c.attempt().outcome is AttemptState.FAILED
    c.empty()
    assert c.job().failure.reason is FailureReason.USER_ERROR
    assert "before it said that it was done" in c.job().failure.message


def test_a_failed_job_is_failed_only_when_its_nodes_hold_nothing_of_it():
    c = cluster(1, 1).feed(submission()).run().fail(0)
    assert effects.SendDesired("n2") in c.effects
    assert (c.job().state, c.attempt().grace_s) == (JobState.RUNNING, 0.0)
    c.feed(events.AttemptEmptied("n1", 1))
    assert c.job().state is JobState.RUNNING
    c.feed(events.AttemptEmptied("n2", 1))
    assert (c.job().state, c.job().failure.rank) == (JobState.FAILED, 0)


def test_a_failed_job_does_not_wait_for_a_lost_node_whose_slots_stay_reserved():
    c = cluster(1, 1).feed(submission()).run().fail(0)
    c.feed(events.AttemptEmptied("n1", 1), events.LeaseExpired("n2", 1))
    assert c.job().state is JobState.FAILED
    assert dict(c.state.reservations) == {("n2", 0): 1}
    c.feed(registration("n2", 1))
    assert phases(c, "n2") == [desired.Phase.STOP]
    c.feed(events.AttemptEmptied("n2", 1))
    assert not c.state.reservations


def test_the_stop_trigger_is_written_once():
    c = cluster(2).feed(submission()).run().fail(1)
    c.fail(0).exit(0, code=1)
    assert c.attempt().stop_trigger == "rank 1 failed"


def test_losing_a_node_stops_no_running_worker():
    c = cluster(2).feed(submission()).run().feed(events.LeaseExpired("n1", 1))
    assert (c.job().state, c.attempt().state) == (JobState.RUNNING, AttemptState.RUNNING)
    assert phases(c) == [desired.Phase.RUN]


def test_losing_a_node_before_the_start_places_the_job_elsewhere():
    c = cluster(2, 2).feed(submission(), events.LeaseExpired("n1", 1))
    assert c.attempt(1).state is AttemptState.ABORTED
    assert (c.job().state, c.job().attempt, c.node_of(0, 2)) == (JobState.STARTING, 2, "n2")


def test_a_shim_that_dies_before_the_start_aborts_the_attempt():
    c = cluster(2).feed(submission(), events.WorkerLost("n1", 1, 0))
    assert c.attempt().outcome is AttemptState.ABORTED


def test_cancelling_a_queued_job_is_immediate():
    c = cluster().feed(submission(), events.CancelRequested("j1"))
    assert (c.job().state, c.job().finished_s) == (JobState.CANCELLED, 1000.0)


def test_cancelling_a_running_job_stops_with_grace_and_repeating_it_changes_nothing():
    c = cluster(2).feed(submission()).run().feed(events.CancelRequested("j1"))
    assert (c.job().state, c.attempt().grace_s) == (JobState.CANCELLING, 5.0)
    before = c.state
    assert c.feed(events.CancelRequested("j1")).state is before
    c.empty()
    assert (c.job().state, c.job().failure) == (JobState.CANCELLED, None)


def test_cancelling_a_job_whose_attempt_is_being_aborted_ends_it_cancelled():
    c = cluster(2).feed(submission(), events.PrepareRefused("n1", 1, "no"), events.CancelRequested("j1"))
    c.empty()
    assert (c.job().state, len(c.state.attempts)) == (JobState.CANCELLED, 1)


def test_cancelling_a_job_that_fails_already_leaves_it_failing():
    c = cluster(2).feed(submission()).run().fail(0).feed(events.CancelRequested("j1")).empty()
    assert c.job().state is JobState.FAILED


def test_cancelling_an_unknown_job_is_refused():
    with pytest.raises(NotFoundError):
        cluster().feed(events.CancelRequested("j9"))


def test_the_start_deadline_aborts_an_unprepared_attempt_and_fails_an_unjoined_one():
    c = cluster(2, 2).feed(submission(), events.StartDeadlinePassed(1))
    assert c.attempt().outcome is AttemptState.ABORTED
    c = cluster(2).feed(submission()).prepare().feed(events.StartDeadlinePassed(1)).empty()
    assert c.job().failure.reason is FailureReason.START_TIMEOUT
    c = cluster(2).feed(submission()).run()
    before = c.state
    assert c.feed(events.StartDeadlinePassed(1)).state is before


def test_a_node_that_refuses_after_the_commit_aborts_the_attempt_and_one_that_runs_goes_on():
    c = cluster(2).feed(submission()).prepare().feed(events.PrepareRefused("n1", 1, "too long"))
    assert (c.attempt().outcome, c.attempt().stop_trigger) == (
        AttemptState.ABORTED,
        "node n1 could not prepare: too long",
    )
    c = cluster(2).feed(submission()).run()
    before = c.state
    assert c.feed(events.PrepareRefused("n1", 1, "late")).state is before


def test_every_job_has_its_own_start_timeout_for_the_preparation_and_again_for_the_start():
    c = cluster(2, 2).feed(submission(start_timeout_s=7))
    assert effects.ArmStartDeadline(1, 7) in c.effects
    assert effects.ArmStartDeadline(1, 7) in c.prepare().effects
    assert effects.pending(c.state, c.now_s) == (effects.ArmStartDeadline(1, 7),)
    c.feed(events.StartDeadlinePassed(1)).empty()
    assert "not every rank joined within 7 s (recovery.start_timeout)" in c.job().failure.message


def test_a_request_sent_twice_makes_one_job_and_another_spec_is_a_conflict():
    c = cluster().feed(submission())
    before = c.state
    again = replace(submission(), job_id="j2")
    assert c.feed(again).state is before
    with pytest.raises(ConflictError, match="another spec"):
        c.feed(replace(again, spec_hash="other"))


def test_a_live_name_is_taken_and_an_ended_one_is_free():
    c = cluster().feed(submission())
    with pytest.raises(ConflictError, match="a live job is called 'gpt': j1"):
        c.feed(submission("j2"))
    c.feed(events.CancelRequested("j1"), submission("j2"))
    assert c.job("j2").state is JobState.QUEUED


def test_names_and_request_ids_are_a_tenants_own():
    c = cluster().feed(submission())
    theirs = submission("j2", tenant="b")
    c.feed(replace(theirs, request_id="request-j1"))
    assert c.job("j2").state is JobState.QUEUED
    before = c.state
    assert c.feed(replace(theirs, job_id="j3", request_id="request-j1")).state is before
    with pytest.raises(ConflictError, match="a live job is called 'gpt': j2"):
        c.feed(submission("j4", tenant="b"))


def test_the_queue_is_not_overtaken_but_an_impossible_job_blocks_nobody():
    c = cluster(2).feed(submission("j1", name="a"), submission("j2", name="b"))
    c.feed(submission("j3", name="c", stages=1), submission("j4", name="huge", stages=8))
    busy = "needs 2 slots, the cluster has 2 (1 node × 2), 2 in use"
    assert c.job("j2").pending_reason == f"{busy}; next in line, after a"
    assert c.job("j3").pending_reason == "waits behind b"
    assert c.job("j4").pending_reason == "needs 8 slots, the cluster has 2 (1 node × 2), 2 in use"
    c = cluster(2).feed(submission("j1", name="huge", stages=8), submission("j2", name="small"))
    assert c.job("j2").state is JobState.STARTING


def test_after_a_restart_no_job_overtakes_one_whose_nodes_are_still_reconnecting():
    c = cluster(2, 2).feed(submission("j1", name="first"), submission("j2", name="second"))
    c.feed(submission("j3", name="large", stages=4), submission("j4", name="small"))
    c.feed(events.CoordinatorStarted(), registration("n1"), events.CancelRequested("j1")).empty(1)
    assert c.job("j4").pending_reason == "waits behind large"


def test_facts_of_ended_unknown_or_foreign_fences_change_nothing():
    c = cluster(2, 2).feed(submission()).run()
    for fact in (
        events.WorkerJoined("n1", 99, 0),
        events.WorkerExited("n2", 1, 0, 1, None, False, "", 0),
        events.WorkerJoined("n1", 1, 7),
        events.AttemptEmptied("n2", 1),
        events.AttemptPrepared("n1", 1),
    ):
        before = c.state
        assert c.feed(fact).state is before
    c.exit(0, code=1).empty()
    before = c.state
    assert c.feed(events.WorkerJoined("n1", 1, 0)).state is before


def test_an_exit_known_before_its_join_still_counts_as_joined_and_done():
    c = cluster(2).feed(submission()).prepare().done(0).exit(0)
    assert c.attempt().state is AttemptState.COMMITTED
    c.done(1).exit(1)
    assert c.job().state is JobState.SUCCEEDED


def test_a_node_that_reports_a_running_fence_empty_has_lost_its_ranks():
    c = cluster(2).feed(submission()).run().feed(events.AttemptEmptied("n1", 1))
    assert [each.state for each in c.attempt().workers] == [WorkerState.LOST] * 2
    assert (c.attempt().state, c.attempt().verdict.reason) == (AttemptState.FAILED, FailureReason.NODE_LOST)
    assert (c.job().state, c.job().attempt) == (JobState.STARTING, 2)


def test_a_daemon_restart_keeps_the_incarnation_and_a_lost_lease_gives_a_new_one():
    c = cluster(2).feed(registration("n1"))
    assert c.state.nodes["n1"].incarnation == 1
    c.feed(events.LeaseExpired("n1", 1), registration("n1"))
    assert (c.state.nodes["n1"].incarnation, c.state.nodes["n1"].state) == (2, NodeState.READY)


def test_a_node_that_returns_without_a_started_attempt_has_lost_its_ranks():
    c = cluster(2).feed(submission()).run().feed(events.LeaseExpired("n1", 1))
    kept = (events.ObservedAttempt(1, is_shim_alive=True, started_ranks=(0, 1)),)
    c.feed(registration("n1", attempts=kept))
    assert c.attempt().state is AttemptState.RUNNING
    c.feed(registration("n1"))
    assert c.attempt().verdict.reason is FailureReason.NODE_LOST


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"host_key": "other"}, "copied state directory"),
        ({"node_id": "other"}, "is held by the live node"),
        ({"cluster_id": "other"}, "belongs to cluster other"),
        ({"highest_epoch": 9}, "older than its fleet"),
        ({"highest_fence": 9}, "older than its fleet"),
        ({"slots": ()}, "at least one slot"),
    ],
)
def test_a_registration_that_would_split_the_truth_is_refused(changes, word):
    with pytest.raises(RegistrationRefused, match=word):
        cluster(2).feed(registration("n1", **changes))


def test_a_node_of_this_cluster_that_has_seen_more_than_the_store_proves_a_rollback():
    with pytest.raises(StoreRolledBack, match="--accept-rollback"):
        cluster(2).feed(registration("n1", cluster_id="c1", highest_fence=9))


def test_an_accepted_rollback_gives_out_no_number_twice_and_closes_nodes_that_run_what_is_unknown():
    unknown = (events.ObservedAttempt(9, is_shim_alive=True), events.ObservedAttempt(8, is_shim_alive=False))
    seen = registration("n1", cluster_id="c1", highest_epoch=7, highest_fence=9, attempts=unknown)
    c = Cluster().feed(events.CoordinatorStarted(accepts_rollback=True), seen, submission(stages=1))
    assert c.state.epoch > 7
    assert "(fences 9)" in c.state.nodes["n1"].cordon.why
    assert not c.state.attempts
    c.feed(events.UncordonRequested("n1", "ann"))
    assert [fence > 9 for fence in c.state.attempts] == [True]


def test_after_the_lease_another_host_may_take_the_state_directory():
    c = cluster(2).feed(events.LeaseExpired("n1", 1), registration("n1", host_key="rebooted"))
    assert c.state.nodes["n1"].incarnation == 2


def test_an_expired_lease_of_an_earlier_incarnation_changes_nothing():
    c = cluster(2).feed(events.LeaseExpired("n1", 1), registration("n1"))
    before = c.state
    assert c.feed(events.LeaseExpired("n1", 1)).state is before


def test_the_end_of_a_session_that_was_replaced_changes_nothing():
    c = cluster().feed(registration("n1", session=1), registration("n1", session=2))
    before = c.state
    assert c.feed(events.NodeDisconnected("n1", 1)).state is before
    assert c.feed(events.NodeDisconnected("n1", 2)).state.nodes["n1"].state is NodeState.DISCONNECTED


def test_a_new_process_holds_no_session_and_arms_the_deadlines_of_starting_attempts():
    c = cluster(2, 2).feed(submission("j1", name="a")).run()
    c.feed(submission("j2", name="b"), events.CoordinatorStarted())
    assert {each.state for each in c.state.nodes.values()} == {NodeState.DISCONNECTED}
    assert effects.pending(c.state, c.now_s) == (effects.ArmStartDeadline(2, 600),)


def test_no_table_leads_out_of_a_terminal_state():
    c = cluster(2).feed(submission(), events.CancelRequested("j1")).empty()
    with pytest.raises(IllegalTransition, match="j1: cancelled -> running"):
        jobs.move(c.job(), JobState.RUNNING, 0.0)
    with pytest.raises(IllegalTransition, match="fence 1"):
        attempts.move(c.attempt(), AttemptState.RUNNING)
    with pytest.raises(IllegalTransition):
        nodes.move(replace(c.state.nodes["n1"], state=NodeState.LOST), NodeState.DISCONNECTED)


def test_attempts_that_could_not_be_started_count_only_until_the_job_runs():
    c = cluster(2).feed(submission())
    for fence in (1, 3, 5):
        c.feed(events.PrepareRefused("n1", fence, "hiccup")).empty(fence)
        assert (c.job().state, c.job().aborts) == (JobState.STARTING, 1)
        c.run(fence + 1)
        assert c.job().aborts == 0
        c.feed(events.DrainRequested("n1", "ann", "", 0.0)).empty(fence + 1)
        assert "could not be started" not in c.job().pending_reason
        c.feed(events.UncordonRequested("n1", "ann"))
