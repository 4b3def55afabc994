"""What follows an attempt that ended badly: another one, after a while, on other nodes; or the job's end."""

from __future__ import annotations

import pytest

from piped.core import effects, events
from piped.core.model import AttemptState, FailureReason, JobState
from tests.unit.core.build import Cluster, cluster, registration, submission


def refuse(c: Cluster, why: str = "no such interpreter") -> Cluster:
    """Have the first node of the job's attempt refuse it, and let the backoff pass."""
    fence = c.job().fence
    return c.feed(events.PrepareRefused(c.node_of(0, fence), fence, why)).empty(fence)


def fail(c: Cluster, step: int = 5, **report: object) -> Cluster:
    """Run the job's newest attempt and have its rank 0 fail."""
    fence = c.job().fence
    return c.run(fence).fail(0, fence=fence, step=step, **report).empty(fence)


def test_a_job_that_a_node_refuses_goes_to_the_others_and_fails_with_all_reasons_once_every_one_has():
    c = cluster(2, 2, 2).feed(submission())
    tried = []
    while c.job().state is JobState.STARTING:
        node = c.node_of(0, c.job().fence)
        tried.append(node)
        refuse(c, f"reason of {node}").wait()
    assert sorted(tried) == ["n1", "n2", "n3"]
    assert (c.job().state, c.job().failure.reason) == (JobState.FAILED, FailureReason.INFRA)
    assert all(f"node {each} could not prepare: reason of {each}" in c.job().failure.message for each in tried)


def test_a_job_waits_for_other_nodes_rather_than_going_back_to_one_that_refused_it():
    c = cluster(1, 1).feed(submission("other", name="other", stages=1), submission(stages=1))
    (refuser,) = c.attempt(2).node_ids
    refuse(c)
    assert c.job().state is JobState.QUEUED
    told = f"next in line, after other; not on {refuser} (could not prepare it: no such interpreter)"
    assert c.job().pending_reason.split(", ", 1)[1].count(told.partition(";")[2]) == 1
    c.run(1).feed(events.CancelRequested("other")).empty(1)
    assert c.node_of(0, 3) != refuser


def test_a_single_node_is_asked_again_after_0_and_1_seconds_before_the_job_fails():
    c = refuse(cluster(2).feed(submission()))
    assert (c.job().state, c.job().fence) == (JobState.STARTING, 2)
    refuse(c)
    assert (c.job().state, c.job().backoff.for_s) == (JobState.BACKOFF, 1.0)
    assert effects.ArmBackoffEnd("j1", 1000.0, 1.0) in c.effects
    assert "no such interpreter" in c.job().pending_reason
    assert effects.pending(c.state, c.now_s) == (effects.ArmBackoffEnd("j1", 1000.0, 1.0),)
    refuse(c.wait())
    assert (c.job().state, c.job().aborts) == (JobState.FAILED, 3)


def test_lost_nodes_never_fail_a_job_that_had_not_started():
    c = cluster(2).feed(submission())
    for number in range(1, 7):
        c.feed(events.LeaseExpired("n1", number), registration("n1")).wait()
        c.feed(events.AttemptEmptied("n1", number)).wait()
    assert c.job().state is not JobState.FAILED


def test_eight_nodes_that_refuse_a_job_are_enough():
    c = cluster(*[2] * 12).feed(submission())
    while c.job().state is JobState.STARTING:
        refuse(c).wait()
    assert (c.job().state, c.job().attempt) == (JobState.FAILED, 8)


def test_releasing_a_job_lets_nodes_that_refused_it_try_again():
    c = cluster(1, 1).feed(submission("other", name="other", stages=1), submission(stages=1))
    refuser = c.node_of(0, 2)
    refuse(c).feed(events.HoldRequested("j1", "ann", ""), events.ReleaseRequested("j1", "ann"))
    assert c.node_of(0, 3) == refuser


def test_without_restarts_the_first_failure_is_the_last():
    c = fail(cluster(2).feed(submission()))
    assert (c.job().state, c.job().failure.message) == (JobState.FAILED, "error of 0")


def test_a_failed_attempt_is_followed_by_another_until_the_restarts_are_used():
    c = cluster(2).feed(submission(restarts=2))
    for number, for_s in ((1, 0.0), (2, 1.0)):
        fail(c, step=number)
        assert c.job().restarts == number
        assert (c.job().backoff.for_s if c.job().backoff else 0.0) == for_s
        c.wait()
        assert (c.job().state, c.job().attempt) == (JobState.STARTING, number + 1)
    fail(c, step=3)
    assert c.job().state is JobState.FAILED
    assert "(not tried again: 2 of 2 restarts are used" in c.job().failure.message


def test_a_job_in_backoff_tells_why_and_can_be_held_or_cancelled():
    c = fail(fail(cluster(2).feed(submission(restarts=9))), step=6)
    assert c.job().state is JobState.BACKOFF
    assert c.job().pending_reason == "attempt 2 failed: rank 0 on n1: error of 0"
    assert not c.state.reservations
    ending = events.BackoffEnded("j1", c.now_s)
    assert c.feed(events.HoldRequested("j1", "ann", "")).job().state is JobState.HELD
    assert c.feed(ending).job().state is JobState.HELD
    c = fail(fail(cluster(2).feed(submission(restarts=9))), step=6)
    assert c.feed(events.CancelRequested("j1")).job().state is JobState.CANCELLED


def test_the_same_failure_in_the_same_step_twice_is_final_and_one_in_an_unknown_step_may_be_another():
    c = fail(fail(cluster(2).feed(submission(restarts=9))))
    assert (c.job().state, c.job().attempt) == (JobState.FAILED, 2)
    assert "an earlier attempt failed in the same way" in c.job().failure.message
    c = cluster(2).feed(submission(restarts=9))
    for fence in (1, 2):
        c.run(fence).exit(0, fence=fence, code=None, signal=9).empty(fence).wait()
    assert (c.job().state, c.job().attempt) == (JobState.STARTING, 3)


@pytest.mark.parametrize("step", [-1, 0])
def test_an_error_of_the_user_before_the_first_step_has_ended_is_final(step):
    c = fail(cluster(2).feed(submission(restarts=9)), step=step)
    assert (c.job().state, c.job().attempt) == (JobState.FAILED, 1)
    c = cluster(2).feed(submission(restarts=9)).prepare().exit(0, code=3).empty()
    assert c.job().state is JobState.FAILED


def test_lost_nodes_and_networks_are_charged_to_nobody():
    c = cluster(2).feed(submission())
    for fence in (1, 2, 3, 4):
        c.run(fence).feed(events.WorkerLost("n1", fence, fence % 2)).empty(fence)
        assert (c.attempt(fence).verdict.reason, c.job().restarts) == (FailureReason.NODE_LOST, 0)
        c.wait()
    assert (c.job().state, c.job().attempt) == (JobState.STARTING, 5)


def test_waits_double_up_to_a_minute():
    c = cluster(2).feed(submission())
    waits = []
    for fence in range(1, 11):
        c.run(fence).feed(events.WorkerLost("n1", fence, fence % 2)).empty(fence)
        waits.append(c.job().backoff.for_s if c.job().backoff else 0.0)
        c.wait()
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_job_starts_anew_only_once_the_lost_node_that_may_run_it_has_reported():
    c = cluster(1, 1, 2).feed(events.CordonRequested("n3", "ann", ""), submission()).run()
    c.feed(events.UncordonRequested("n3", "ann"), events.LeaseExpired("n2", 1))
    rank = next(each.rank for each in c.attempt().placement if each.node_id == "n1")
    c.fail(rank, peer_rank=1 - rank, is_transport=True).feed(events.AttemptEmptied("n1", 1))
    assert (c.attempt().state, c.job().attempt) == (AttemptState.STOPPING, 1)
    assert c.job().pending_reason.startswith("waits for n2, which is lost and may still run it")
    c.feed(registration("n2", 1, attempts=(events.ObservedAttempt(1, True, (1 - rank,)),)))
    assert c.job().attempt == 1
    c.feed(events.AttemptEmptied("n2", 1))
    assert (c.job().state, c.job().attempt) == (JobState.STARTING, 2)


def test_a_job_that_waits_for_a_lost_node_goes_on_when_that_is_forgotten_and_ends_when_it_is_cancelled():
    def waiting() -> Cluster:
        c = cluster(1, 1).feed(submission()).run().feed(events.LeaseExpired("n2", 1))
        rank = next(each.rank for each in c.attempt().placement if each.node_id == "n1")
        return c.fail(rank, peer_rank=1 - rank, is_transport=True).feed(events.AttemptEmptied("n1", 1))

    c = waiting().feed(events.ForgetRequested("n2", "ann", ""))
    assert (c.attempt().state, c.job().state) == (AttemptState.FAILED, JobState.QUEUED)
    assert waiting().feed(events.CancelRequested("j1")).job().state is JobState.CANCELLED


def test_what_is_charged_to_nobody_does_not_go_on_for_ever_either():
    c = cluster(2).feed(submission())
    for fence in range(1, 7):
        c.run(fence).feed(events.WorkerLost("n1", fence, 1)).empty(fence).wait()
    assert (c.job().state, c.job().failure.reason) == (JobState.FAILED, FailureReason.NODE_LOST)
    silent = cluster(3).feed(submission(stages=3))
    for fence in (1, 2):
        silent.run(fence).fail(0, fence=fence, peer_rank=1, is_transport=True, step=5).empty(fence).wait()
    assert (silent.job().state, silent.job().failure.reason) == (JobState.FAILED, FailureReason.INFRA)
    assert silent.job().attempt == 2


def test_a_node_that_gives_up_an_attempt_after_its_preparation_is_left_out_of_the_next_one():
    refused = cluster(2, 2).feed(submission()).prepare()
    (first,) = refused.attempt().node_ids
    refused.feed(events.PrepareRefused(first, 1, "its workers can't be told what to do")).empty()
    gone = cluster(2, 2).feed(submission()).run()
    gone.feed(events.AttemptEmptied(first, 1))
    for c in (refused, gone):
        assert c.node_of(0, 2) != first


def not_reached(c: Cluster, caller: str, peer: str) -> Cluster:
    """Have one node of the newest attempt say that it can't call another, and let the backoff pass."""
    fence = c.job().fence
    return c.feed(events.PrepareRefused(caller, fence, f"{caller} can't call {peer}", peer_id=peer)).empty(fence).wait()


def test_a_node_that_reaches_nobody_is_found_out_though_it_accuses_others():
    c = cluster(1, 1, 1).feed(submission())
    for _ in range(2):
        peer = next(each for each in c.attempt(c.job().fence).node_ids if each != "n1")
        not_reached(c, "n1", peer)
    assert set(c.attempt(3).node_ids) == {"n2", "n3"}
    assert [node.strikes for node in c.state.nodes.values()] == [("j1",), (), ()]


def test_a_node_that_two_others_can_not_reach_is_to_blame_and_one_that_has_prepared_is_not():
    c = cluster(1, 1, 1).feed(submission(stages=3))
    not_reached(not_reached(c, "n1", "n3"), "n2", "n3")
    assert [node.strikes for node in c.state.nodes.values()] == [(), (), ("j1",)]
    well = cluster(1, 1).feed(submission()).feed(events.AttemptPrepared("n2", 1))
    not_reached(well, "n1", "n2")
    assert [node.strikes for node in well.state.nodes.values()] == [("j1",), ()]
