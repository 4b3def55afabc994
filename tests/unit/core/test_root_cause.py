"""Who is blamed, told by what the workers reported."""

from __future__ import annotations

from piped.core import events
from piped.core.model import FailureReason, Moment
from tests.unit.core.build import cluster, submission

TRANSPORT = {"is_transport": True}


def running(*num_slots: int, stages: int = 3):
    return cluster(*num_slots).feed(submission(stages=stages)).run()


def verdict(c):
    return c.attempt().verdict


def test_the_earliest_own_failure_on_one_host_is_the_cause():
    c = running(3).fail(2, at_ns=300).fail(1, at_ns=200).fail(0, at_ns=100, peer_rank=1, **TRANSPORT)
    assert (verdict(c).rank, verdict(c).reason) == (1, FailureReason.USER_ERROR)


def test_an_exit_that_the_supervisor_caused_counts_for_nothing():
    c = running(3).fail(0, peer_rank=1, **TRANSPORT).exit(2, code=None, signal=9, by_supervisor=True)
    c.exit(1, code=None, signal=11)
    assert (verdict(c).rank, verdict(c).reason) == (1, FailureReason.SIGNALLED)
    assert verdict(c).message == "killed by signal 11"


def test_a_victim_points_at_the_rank_that_said_nothing():
    c = running(3).fail(0, peer_rank=1, **TRANSPORT).fail(1, peer_rank=2, **TRANSPORT)
    assert (verdict(c).rank, verdict(c).reason) == (2, FailureReason.INFRA)


def test_a_victim_that_points_at_a_lost_node_is_node_lost():
    c = running(2, 1).fail(0, peer_rank=2, **TRANSPORT).feed(events.LeaseExpired("n2", 1))
    c.feed(events.AttemptEmptied("n1", 1))
    assert (verdict(c).reason, verdict(c).node_name) == (FailureReason.NODE_LOST, "n2")


def test_victims_in_a_circle_blame_no_rank():
    c = running(3).fail(0, peer_rank=1, **TRANSPORT).fail(1, peer_rank=0, **TRANSPORT)
    assert (verdict(c).rank, verdict(c).reason) == (-1, FailureReason.INFRA)
    assert "no rank failed by itself" in verdict(c).message


def test_failures_on_two_hosts_are_told_apart_by_their_victims_or_called_a_tie():
    c = running(1, 1, 1).fail(1, at_ns=900).fail(2, at_ns=100)
    assert "which was first is not known" in verdict(c).message
    c.fail(0, peer_rank=2, **TRANSPORT)
    assert verdict(c).rank == 2
    assert "not known" not in verdict(c).message


def test_a_nan_is_numeric():
    c = running(3).fail(2, is_numeric=True, step=7)
    assert (verdict(c).reason, verdict(c).step) == (FailureReason.NUMERIC, 7)


def test_a_lost_rank_outranks_an_exception():
    c = running(3).fail(0).feed(events.WorkerLost("n1", 1, 1))
    assert (verdict(c).rank, verdict(c).reason) == (1, FailureReason.NODE_LOST)


def test_a_node_that_stops_its_workers_unasked_is_named():
    c = running(3).exit(0, code=None, signal=15, by_supervisor=True)
    assert verdict(c).reason is FailureReason.INFRA
    assert "stopped by its own node n1" in verdict(c).message


def test_a_start_timeout_names_the_missing_ranks_even_after_they_were_stopped():
    c = cluster(3).feed(submission(stages=3)).prepare()
    c.feed(events.WorkerJoined("n1", 1, 0), events.WorkerSpawned("n1", 1, 1, 77, 5), events.StartDeadlinePassed(1))
    c.exit(1, code=None, signal=9, by_supervisor=True, log_tail="first\nimporting torch\n")
    assert verdict(c).message == (
        "not every rank joined within 600 s (recovery.start_timeout): rank 1 on n1 (stages 1, spawned, last log line: importing "
        "torch); rank 2 on n1 (stages 2, planned)"
    )


def test_a_report_survives_the_stop_that_follows_it():
    c = running(3).fail(1).exit(1, code=None, signal=9, by_supervisor=True)
    assert (verdict(c).rank, verdict(c).log_tail) == (1, "tail 1")


def quoting(c, *, rank=0, peer=1, at_ns=0):
    """A rank drops the step because `peer` told all of them of its error."""
    words = {"peer_message": f"error of {peer}", "peer_traceback": f"traceback of {peer}"}
    return c.fail(rank, at_ns=at_ns, step=4, peer_rank=peer, **words, **TRANSPORT)


def test_a_rank_that_was_stopped_before_it_reported_is_blamed_in_its_own_words():
    c = quoting(running(3)).exit(1, code=None, signal=9, by_supervisor=True)
    blamed = verdict(c)
    assert (blamed.rank, blamed.reason, blamed.step) == (1, FailureReason.USER_ERROR, 4)
    assert (blamed.message, blamed.traceback, blamed.log_tail) == ("error of 1", "traceback of 1", "tail 1")


def test_whichever_of_quote_and_report_comes_first_the_verdict_is_the_report():
    own = {"traceback": "whole", "step": 4}
    late, early = quoting(running(1, 1, 1)).fail(1, **own), quoting(running(1, 1, 1).fail(1, **own))
    assert verdict(late) == verdict(early)
    assert (verdict(late).rank, verdict(late).message, verdict(late).traceback) == (1, "error of 1", "whole")


def test_the_rank_that_all_were_told_of_failed_before_one_that_ended_meanwhile_unless_another_points_there():
    c = quoting(running(3)).exit(2, code=7, signal=None, boottime_ns=1)
    assert verdict(c).rank == 1 and "not known" not in verdict(c).message
    c = quoting(running(4, stages=4)).exit(2, code=7, signal=None, boottime_ns=1).fail(3, peer_rank=2, **TRANSPORT)
    assert "ranks 1 and 2 failed" in verdict(c).message and "not known" in verdict(c).message


def test_a_loss_that_is_no_number_is_seen_by_all_and_blamed_on_none():
    c = running(1, 1, 1)
    for rank in range(3):
        c.fail(rank, at_ns=9 - rank, is_numeric=True, step=7)
        assert (verdict(c).rank, verdict(c).reason, verdict(c).message) == (-1, FailureReason.NUMERIC, "error of 0")


def test_a_rank_out_of_memory_outranks_exceptions_and_lost_ranks_and_a_bare_kill_is_no_such():
    c = running(3).fail(0, at_ns=1).exit(1, code=None, signal=9, oom_killed=True)
    c.feed(events.WorkerLost("n1", 1, 2))
    assert (verdict(c).rank, verdict(c).reason) == (1, FailureReason.OOM_KILLED)
    assert "for want of memory" in verdict(c).message
    c = running(3).exit(1, code=None, signal=9)
    assert verdict(c).reason is FailureReason.SIGNALLED


def test_what_a_rank_told_of_its_killed_child_is_part_of_the_verdict():
    c = running(3).fail(1, message="RuntimeError: DataLoader worker is killed").exit(1, code=1, oom_killed=True)
    assert verdict(c).reason is FailureReason.OOM_KILLED and "DataLoader worker" in verdict(c).message


def test_failures_on_two_hosts_are_ordered_by_their_corrected_clocks_unless_the_error_leaves_it_open():
    def failed(*moments):
        c = running(1, 1, 1)
        for rank, (earliest, latest) in enumerate(moments, 1):
            c.exit(rank, code=7, boottime_ns=rank, moment=Moment(earliest, latest))
        return verdict(c)

    assert failed((200, 220), (100, 120)).rank == 2
    assert "not known" not in failed((200, 220), (100, 120)).message
    assert "not known" in failed((110, 130), (100, 120)).message


def test_a_wrong_rank_is_not_certain_where_one_failure_has_no_corrected_time():
    c = running(1, 1, 1).exit(1, code=7, moment=Moment(5, 6)).exit(2, code=7)
    assert "not known" in verdict(c).message


def test_what_a_rank_told_of_itself_stands_though_its_node_is_lost_afterwards():
    c = running(2, 1).fail(2, message="ValueError: x").feed(events.LeaseExpired("n2", 1))
    c.feed(events.AttemptEmptied("n1", 1))
    assert (verdict(c).reason, verdict(c).message) == (FailureReason.USER_ERROR, "ValueError: x")


def start_timeout(c):
    return c.feed(events.StartDeadlinePassed(1)).attempt().verdict


def test_of_ranks_that_did_not_join_a_lost_one_is_blamed_then_one_that_was_not_started_and_else_none():
    ready = cluster(1, 1, 1).feed(submission(stages=3)).prepare()
    spawned = [events.WorkerSpawned(ready.node_of(rank), 1, rank, 100 + rank, 7) for rank in range(3)]
    assert start_timeout(ready.feed(*spawned)).rank == -1
    late = cluster(1, 1, 1).feed(submission(stages=3)).prepare().feed(spawned[0], spawned[2])
    assert (start_timeout(late).rank, start_timeout(late).reason) == (1, FailureReason.START_TIMEOUT)
    lost = cluster(1, 1, 1).feed(submission(stages=3)).prepare().feed(*spawned[:2], events.LeaseExpired("n3", 1))
    assert (start_timeout(lost).node_name, start_timeout(lost).reason) == ("n3", FailureReason.NODE_LOST)
