"""A rank that SIGKILL does not end: nobody waits for it, and nobody gets its slot."""

from __future__ import annotations

from piped.core import events
from piped.core.model import AttemptState, JobState, WorkerState
from tests.unit.core.build import cluster, submission


def cancelled():
    """A job of three ranks on two nodes that was cancelled; rank 0 on n1 can't be killed."""
    c = cluster(2, 1).feed(submission(stages=3)).run().feed(events.CancelRequested("j1"))
    for rank in (1, 2):
        c.exit(rank, code=None, signal=9, by_supervisor=True)
    return c.feed(events.AttemptEmptied("n2", 1))


def test_a_cancel_ends_all_the_same_and_the_slots_stay_taken_until_the_rank_ends():
    c = cancelled()
    assert c.job().state is JobState.CANCELLING
    c.feed(events.WorkerUnkillable("n1", 1, 0))
    assert (c.job().state, c.attempt().state) == (JobState.CANCELLED, AttemptState.CANCELLED)
    assert c.attempt().workers[0].state is WorkerState.UNKILLABLE
    assert {key[0] for key in c.state.reservations} == {"n1"}
    c.feed(events.AttemptEmptied("n1", 1))
    assert not c.state.reservations


def test_the_others_of_its_node_are_waited_for():
    c = cluster(3).feed(submission(stages=3)).run().feed(events.CancelRequested("j1"))
    c.feed(events.WorkerUnkillable("n1", 1, 0)).exit(1, code=None, signal=9, by_supervisor=True)
    assert c.job().state is JobState.CANCELLING
    c.feed(events.WorkerUnkillable("n1", 1, 2))
    assert c.job().state is JobState.CANCELLED


def test_one_that_ends_after_all_is_no_longer_unkillable():
    c = cluster(2, 1).feed(submission(stages=3)).run().feed(events.CancelRequested("j1"))
    c.feed(events.WorkerUnkillable("n1", 1, 0)).exit(0, code=None, signal=9, by_supervisor=True)
    assert c.attempt().workers[0].state is WorkerState.EXITED


def test_a_job_that_is_to_start_anew_waits_for_it_and_says_so():
    c = cluster(1, 1).feed(submission(stages=2)).run().feed(events.WorkerLost("n2", 1, 1))
    c.feed(events.AttemptEmptied("n2", 1), events.WorkerUnkillable("n1", 1, 0))
    assert not c.job().is_terminal and not c.attempt().is_terminal
    assert "waits for n1, which is lost or can't kill it" in c.job().pending_reason
    c.feed(events.AttemptEmptied("n1", 1))
    assert c.attempt().is_terminal
