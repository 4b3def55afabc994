"""Who is blamed for an attempt that stands still, told by where the ranks say that they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piped.core import events, hangs
from piped.core.hangs import Position, Sighting
from piped.core.model import FailureReason, JobState
from tests.unit.core.build import cluster, submission

NOW_S = 1000.0


class Watched:
    """A running job of one stage per node, seen from where its ranks say that they are."""

    def __init__(self, ranks=3, **spec):
        self.cluster = cluster(*[1] * ranks).feed(submission(stages=ranks, **spec)).run()
        self.seen = {rank: Sighting(Position(step=7, section="step"), 0.0, NOW_S) for rank in range(ranks)}

    def rank(self, rank, *, first_s=0.0, **changes):
        self.seen[rank] = Sighting(replace(self.seen[rank].position, **changes), first_s, NOW_S)
        return self

    def find(self):
        c = self.cluster
        return hangs.find(c.attempt(), c.job().spec, c.state.nodes, self.seen, NOW_S)

    def blamed(self):
        return found.failure.rank if (found := self.find()) else None


def waiting(watched, age_s=30.0):
    """Ranks 0 and 2 wait for rank 1."""
    return watched.rank(0, waiting_on=(1,), age_s=age_s).rank(2, waits_for_all=True, age_s=age_s)


def test_the_rank_that_waits_for_nobody_is_blamed_and_named_with_its_action_and_its_waiters():
    watched = waiting(Watched()).rank(0, action="0B1").rank(1, action="1F2", age_s=31.0)
    failure = watched.find().failure
    assert (failure.reason, failure.rank, failure.node_name, failure.step) == (FailureReason.HANG, 1, "n2", 7)
    assert failure.message == (
        "made no progress for 31 s in step 8, at 1F2; rank 0 waits for 1 at 0B1; rank 2 waits for all others"
    )


def test_nobody_is_blamed_while_the_rank_that_is_waited_for_moves():
    assert waiting(Watched()).rank(1, age_s=1.0).find() is None


def test_a_silent_rank_counts_before_one_that_says_where_it_is_and_what_it_waited_for_is_past():
    watched = waiting(Watched()).rank(1, waiting_on=(0,), age_s=0.5, silent_s=30.0)
    failure = watched.find().failure
    assert failure.rank == 1 and "said nothing for 30 s" in failure.message and "rank 1 waits" not in failure.message


def test_the_step_of_a_silent_rank_is_what_the_others_have_seen_of_it():
    watched = waiting(Watched()).rank(0, step=9).rank(2, step=9).rank(1, step=7, silent_s=30.0)
    assert watched.find().failure.step == 9


def test_ranks_that_wait_for_each_other_are_a_network_and_no_rank_is_to_blame():
    watched = Watched(2).rank(0, waiting_on=(1,), age_s=30.0).rank(1, waiting_on=(0,), age_s=30.0)
    assert watched.find().failure.rank == -1
    assert "look at the network" in watched.find().failure.message
    assert watched.rank(1, age_s=2.0).find() is None, "one of them has just moved"


def test_two_that_wait_for_nobody_are_a_tie_and_it_says_so():
    watched = Watched().rank(0, waits_for_all=True, age_s=30.0).rank(1, age_s=30.0).rank(2, age_s=30.0)
    assert "which stopped first is not known" in watched.find().failure.message


@pytest.mark.parametrize(
    ("section", "longest_s", "limit_s"),
    [
        ("step", 0.01, 10.0),
        ("step", 4.0, 20.0),
        ("compiled step", 4.0, 120.0),
        ("compiled step", 40.0, 200.0),
        ("clip", 4.0, 20.0),
        ("data", 4.0, 120.0),
        ("eval", 0.0, 120.0),
        ("hook", 0.0, 120.0),
        ("save", 0.0, 900.0),
        ("first step", 0.0, 600.0),
    ],
)
def test_each_section_has_a_limit_of_its_own_and_steps_five_of_the_longest_of_any_rank(section, longest_s, limit_s):
    watched = Watched(2).rank(0, waiting_on=(1,), age_s=3000.0, longest_step_s=longest_s)
    first_s = NOW_S - 950.0
    assert watched.rank(1, section=section, age_s=limit_s - 0.1, first_s=first_s).find() is None
    assert watched.rank(1, section=section, age_s=limit_s + 0.1, first_s=first_s).blamed() == 1


def test_whatever_is_done_before_the_first_step_has_ended_has_the_time_of_a_start():
    watched = Watched(2).rank(1, section="data", step=0, age_s=500.0)
    assert watched.find() is None
    assert watched.rank(1, age_s=601.0).blamed() == 1


def test_a_job_may_say_how_long_itself_for_every_section_but_no_shorter_than_silence_takes_to_be_heard():
    watched = Watched(2, hang_timeout_s=30).rank(1, section="save", age_s=29.0)
    assert watched.find() is None
    assert watched.rank(1, age_s=31.0).blamed() == 1
    assert Watched(2, hang_timeout_s=1).rank(1, age_s=3.9).find() is None


def test_what_was_before_this_coordinator_looked_does_not_count():
    assert waiting(Watched()).rank(1, age_s=300.0, first_s=NOW_S - 9.0).find() is None


def test_a_rank_that_is_not_heard_of_or_whose_node_is_away_for_a_moment_leaves_all_undecided():
    watched = waiting(Watched()).rank(1, age_s=31.0)
    watched.cluster.feed(events.NodeDisconnected("n2", 0))
    assert watched.find() is None
    unheard = waiting(Watched()).rank(1, age_s=31.0)
    del unheard.seen[2]
    assert unheard.find() is None


def test_a_lost_node_that_others_wait_for_is_lost_and_one_that_nobody_waits_for_is_left_alone():
    watched = waiting(Watched()).rank(1, age_s=31.0)
    watched.cluster.feed(events.LeaseExpired("n2", 1))
    failure = watched.find().failure
    assert (failure.reason, failure.rank, failure.node_name) == (FailureReason.NODE_LOST, 1, "n2")
    assert watched.rank(0, age_s=0.0).rank(2, age_s=0.0).find() is None


def test_a_rank_of_a_lost_node_has_the_time_of_what_it_was_at_when_it_was_last_heard_of():
    watched = waiting(Watched()).rank(1, section="data", age_s=31.0)
    watched.cluster.feed(events.LeaseExpired("n2", 1))
    assert watched.find() is None
    watched.seen[1] = replace(watched.seen[1], last_s=NOW_S - 100.0)
    assert watched.blamed() == 1
    unheard = waiting(Watched(), age_s=800.0)
    del unheard.seen[1]
    unheard.cluster.feed(events.LeaseExpired("n2", 1))
    assert unheard.find() is None
    assert waiting(unheard, age_s=901.0).blamed() == 1


def test_a_rank_that_said_done_is_not_blamed_for_lingering():
    watched = waiting(Watched()).rank(1, age_s=31.0)
    watched.cluster.done(1)
    assert watched.blamed() != 1


def test_a_rank_that_has_ended_well_is_waited_for_no_more():
    watched = Watched(2).rank(0, waits_for_all=True, age_s=30.0)
    watched.cluster.done(1).exit(1)
    assert watched.blamed() == 0


def test_a_hang_stops_the_attempt_with_stacks_and_no_later_exit_changes_the_verdict():
    watched = waiting(Watched()).rank(1, age_s=31.0)
    c = watched.cluster.feed(watched.find())
    assert c.attempt().stop_trigger.startswith("hang: rank 1 on n2: made no progress for 31 s in step 8")
    c.exit(0, code=None, signal=9, by_supervisor=True).fail(2, peer_rank=0, is_transport=True)
    c.exit(1, code=None, signal=9, by_supervisor=True, log_tail="stacks").empty()
    assert (c.job().state, c.job().failure.reason) == (JobState.FAILED, FailureReason.HANG)
    assert (c.job().failure.rank, c.job().failure.log_tail) == (1, "stacks")
    c.feed(watched_again := events.HangFound(1, c.job().failure))
    assert c.job().failure == watched_again.failure
