"""Every rank's part in a failure."""

from __future__ import annotations

from piped.core import accounts, events
from piped.core.accounts import Role
from tests.unit.core.build import cluster, submission


def test_the_report_tells_the_first_failure_its_victims_and_who_was_only_stopped():
    c = cluster(5).feed(submission(stages=5)).run()
    c.fail(1, at_ns=5, step=3).fail(0, at_ns=9, is_transport=True, peer_rank=1, step=3).fail(4, at_ns=7)
    c.exit(2, code=None, signal=9, by_supervisor=True).feed(events.WorkerDone("n1", 1, 3, 10)).exit(3)
    parts = accounts.of(c.attempt())
    assert [each.role for each in parts] == [Role.VICTIM, Role.ROOT, Role.STOPPED, Role.SUCCEEDED, Role.FAILED]
    assert (parts[0].peer_rank, parts[1].step, parts[2].message) == (1, 3, "signal 9")


def test_a_lost_rank_that_is_not_blamed_and_one_that_never_started_are_told_apart():
    c = cluster(1, 1, 1).feed(submission(stages=3)).prepare()
    c.feed(events.WorkerLost("n1", 1, 0), events.WorkerLost("n2", 1, 1))
    assert [each.role for each in accounts.of(c.attempt())] == [Role.ROOT, Role.LOST, Role.UNFINISHED]
