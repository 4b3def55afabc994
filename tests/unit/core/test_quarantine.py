"""A node that can't prepare is put away for a while."""

from __future__ import annotations

from piped.core import effects, events
from piped.core.model import AttemptState, JobState
from tests.unit.core.build import cluster, registration, submission


def refuse(c, job_id, node_id="n1", message="disk full"):
    """Submit a job and have the node refuse it; the job is cancelled then."""
    fence = c.feed(submission(job_id, name=job_id, stages=1)).job(job_id).fence
    c.feed(events.PrepareRefused(node_id, fence, message, is_nodes=True))
    c.feed(events.CancelRequested(job_id)).empty(fence)
    return c


def node(c):
    return c.state.nodes["n1"]


def test_a_node_that_refuses_three_jobs_in_a_row_gets_no_more_and_says_why():
    c = refuse(refuse(cluster(2), "a"), "b")
    assert (len(node(c).strikes), node(c).quarantine) == (2, None)
    fence = c.feed(submission("c", name="c")).job("c").fence
    c.feed(events.PrepareRefused("n1", fence, "disk full", is_nodes=True))
    assert effects.ArmQuarantineEnd("n1", 1000.0, 600.0) in c.effects
    c.empty(fence)
    assert c.job("c").state is JobState.QUEUED
    assert "no new work for n1 (in quarantine: 3 jobs in a row could not be prepared, the last: disk full)" in (
        c.job("c").pending_reason
    )
    c.feed(registration("n1"))
    assert node(c).quarantine is not None
    c.feed(events.QuarantineEnded("n1", 1000.0))
    assert c.job("c").state is JobState.STARTING


def test_a_bad_job_gives_no_strike_to_any_of_the_nodes_that_refuse_it():
    c = cluster(2, 2).feed(submission())
    while (job := c.job()).state is JobState.STARTING:
        c.feed(events.PrepareRefused(c.node_of(0, job.fence), job.fence, "no such interpreter")).empty(job.fence)
        c.wait()
    assert (job.state, [each.strikes for each in c.state.nodes.values()]) == (JobState.FAILED, [(), ()])


def test_a_node_that_refuses_what_another_prepares_gets_a_strike_whichever_comes_first():
    c = cluster(1, 1).feed(submission(), events.AttemptPrepared("n2", 1), events.PrepareRefused("n1", 1, "no disk"))
    assert (node(c).strikes, c.state.nodes["n2"].strikes) == (("j1",), ())
    c = cluster(1, 1).feed(submission(), events.PrepareRefused("n1", 1, "no disk"))
    assert node(c).strikes == ()
    c.feed(events.AttemptPrepared("n2", 1))
    assert (node(c).strikes, c.state.nodes["n2"].strikes) == (("j1",), ())


def test_a_later_attempt_that_another_node_prepares_proves_the_first_node_wrong():
    c = cluster(1, 1).feed(submission(stages=1), events.PrepareRefused("n1", 1, "no such interpreter")).empty()
    assert (c.node_of(0, 2), node(c).strikes) == ("n2", ())
    c.prepare(2)
    assert node(c).strikes == ("j1",)


def test_a_node_that_prepares_a_job_has_no_strikes_any_more():
    c = refuse(refuse(cluster(2), "a"), "b").feed(submission())
    c.prepare(c.job().fence)
    assert node(c).strikes == ()


def test_a_timeout_is_a_strike_for_the_late_node_alone():
    c = cluster(1, 1).feed(submission()).feed(events.AttemptPrepared("n2", 1), events.StartDeadlinePassed(1))
    assert c.attempt().outcome is AttemptState.ABORTED
    assert (node(c).strikes, c.state.nodes["n2"].strikes) == (("j1",), ())


def test_after_the_quarantine_one_strike_suffices_and_an_operator_may_end_it_for_good():
    c = refuse(refuse(refuse(cluster(2), "a"), "b"), "c").feed(events.QuarantineEnded("n1", 1000.0))
    assert refuse(c, "d").state.nodes["n1"].quarantine is not None
    c.feed(events.UncordonRequested("n1", "ann"))
    assert (node(c).strikes, node(c).quarantine) == ((), None)


def test_the_end_of_an_earlier_quarantine_opens_no_node_that_is_in_another():
    c = refuse(refuse(refuse(cluster(2), "a"), "b"), "c").feed(events.UncordonRequested("n1", "ann"))
    first, c.now_s = events.QuarantineEnded("n1", c.now_s), c.now_s + 300.0
    refuse(refuse(refuse(c, "d"), "e"), "f").feed(first)
    assert node(c).quarantine is not None
