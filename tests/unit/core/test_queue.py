"""Whose turn it is, who waits and why, who makes room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piped.core import events
from piped.core.model import AttemptState, JobState
from piped.errors import NotFoundError, WrongStateError
from tests.unit.core.build import cluster, registration, submission

STARTING, RUNNING, QUEUED = JobState.STARTING, JobState.RUNNING, JobState.QUEUED


def job(name, stages=1, **changes):
    """Return the submission of a job whose id is its name."""
    return submission(name, name=name, stages=stages, **changes)


def states(c):
    return {job_id: each.state.value for job_id, each in c.state.jobs.items()}


def fence_of(c, job_id):
    return c.job(job_id).fence


def test_higher_priority_goes_first_and_equals_in_the_order_of_submission():
    c = cluster(1).feed(job("a")).run()
    c.feed(job("b"), job("low", priority=-1), job("c"))
    c.feed(events.CancelRequested("a")).empty()
    assert c.job("b").state is STARTING
    assert c.job("c").pending_reason.endswith("; next in line, after b")
    assert c.job("low").pending_reason == "waits behind c"


def test_small_jobs_fill_what_the_head_can_not_use_and_never_what_is_kept_for_it():
    c = cluster(2, 1).feed(job("a")).run()  # on n2, which it fills
    c.feed(job("b", stages=2)).run(2)  # n1
    c.feed(job("large", stages=2, slots_per_node=2), job("small"))
    assert c.job("large").earmark == (("n1", 0), ("n2", 0))
    assert c.job("large").pending_reason.endswith("3 in use; next in line, after b, a")
    c.feed(events.CancelRequested("a")).empty(1)
    assert (c.job("large").state, c.job("small").state) == (QUEUED, QUEUED)  # n2's slot is kept
    c.feed(events.CancelRequested("b")).empty(2)
    assert (c.job("large").state, c.job("small").state) == (STARTING, STARTING)


def test_a_job_behind_the_head_starts_on_slots_that_the_head_can_not_take():
    c = cluster(2, 2, 2).feed(job("a", stages=2), job("b", stages=2))
    c.feed(job("wide", stages=3, slots_per_node=1), job("small"))
    assert c.job("wide").state is QUEUED
    assert c.job("small").state is STARTING
    assert set(c.job("wide").earmark).isdisjoint(
        {key for key, fence in c.state.reservations.items() if fence == fence_of(c, "small")}
    )


def test_a_stream_of_small_jobs_does_not_starve_a_large_one():
    c = cluster(2).feed(job("s0"), job("s1"), job("large", stages=2))
    for number in range(2, 12):
        c.feed(job(f"s{number}"))
    for name in ("s0", "s1"):
        fence = fence_of(c, name)
        c.feed(events.CancelRequested(name)).empty(fence)
    assert c.job("large").state is STARTING
    assert c.job("s2").state is QUEUED


def test_a_higher_priority_takes_the_slots_of_a_lower_one_with_grace_and_charges_it_nothing():
    c = cluster(2).feed(job("low", stages=2)).run().feed(job("high", stages=2, priority=5))
    assert (c.job("low").state, c.attempt(1).grace_s) == (JobState.PREEMPTING, 5.0)
    assert c.attempt(1).stop_trigger == "makes room for high (high), whose priority is higher"
    assert c.job("high").pending_reason.endswith("next in line, after low")
    c.empty(1)
    assert (c.attempt(1).state, c.job("low").state, c.job("low").aborts) == (AttemptState.PREEMPTED, QUEUED, 0)
    assert c.job("high").state is STARTING
    assert c.job("low").pending_reason.endswith("next in line, after high")


def test_nobody_is_preempted_by_an_equal_priority_or_when_it_would_not_be_enough():
    c = cluster(2).feed(job("a"), job("b", priority=5), job("equal", stages=2), job("high", stages=2, priority=5))
    assert (c.job("a").state, c.job("b").state) == (STARTING, STARTING)
    assert c.job("high").pending_reason.endswith("next in line, after a, b")


def test_the_lowest_and_newest_are_preempted_first_and_no_more_than_needed():
    c = cluster(4).feed(job("old"), job("new"), job("lower", priority=-1), job("big"))
    c.feed(job("high", priority=1))
    assert [each for each, state in states(c).items() if state == "preempting"] == ["lower"]
    c = cluster(3).feed(job("one"), job("two", stages=2)).feed(job("high", stages=2, priority=1))
    assert [each for each, state in states(c).items() if state == "preempting"] == ["two"]


def test_a_held_job_is_not_placed_and_keeps_its_place_in_the_queue():
    c = cluster(1).feed(job("a")).run().feed(job("b"), job("c"), events.HoldRequested("b", "ann", "wait for data"))
    assert (c.job("b").state, c.job("b").pending_reason) == (JobState.HELD, "held by ann: wait for data")
    assert c.job("c").earmark and not c.job("b").earmark
    c.feed(events.ReleaseRequested("b", "ann"))
    assert (c.job("b").state, c.job("c").pending_reason) == (QUEUED, "waits behind b")
    c.feed(events.HoldRequested("b", "ann", ""), events.CancelRequested("b"))
    assert c.job("b").state is JobState.CANCELLED


def test_a_job_that_has_started_can_not_be_held():
    with pytest.raises(WrongStateError, match="a is starting: only a queued job can be held"):
        cluster(1).feed(job("a"), events.HoldRequested("a", "ann", ""))
    with pytest.raises(NotFoundError):
        cluster(1).feed(events.HoldRequested("a", "ann", ""))


def test_a_job_runs_on_nodes_with_its_labels_alone_and_says_so_while_there_is_none():
    c = cluster(4).feed(job("picky", stages=2, node_selector=(("gpu", "h100"),)), job("any"))
    assert c.job("picky").pending_reason == (
        "needs 2 slots on nodes with gpu=h100, which have 0 (no ready node), 0 in use"
    )
    assert c.job("any").state is STARTING
    c.feed(registration("n2", 2, labels=(("gpu", "h100"), ("rack", "a"))))
    assert (c.job("picky").state, c.node_of(0, fence_of(c, "picky"))) == (STARTING, "n2")


def test_a_tenant_at_its_quota_waits_in_order_and_holds_up_nobody_else():
    c = cluster(8)
    c.state = replace(c.state, quotas={"ann": 3})
    c.feed(
        job("a1", 2, tenant="ann"), job("a2", 2, tenant="ann"), job("a3", 1, tenant="ann"), job("a4", 4, tenant="ann")
    )
    c.feed(job("b1", 4, tenant="bob"))
    assert (c.job("a1").state, c.job("b1").state) == (STARTING, STARTING)
    assert c.job("a2").pending_reason == "needs 2 slots, tenant ann may hold 3 and holds 2"
    assert c.job("a3").pending_reason == "waits behind a2 of tenant ann"
    c.feed(events.CancelRequested("a1")).empty(1)
    assert (c.job("a2").state, c.job("a3").state) == (STARTING, STARTING)
    assert c.job("a4").pending_reason == "needs 4 slots, tenant ann may hold 3 and holds 3"


def test_two_gangs_that_each_need_two_of_three_slots_never_hold_one_each():
    c = cluster(1, 1, 1).feed(job("a", stages=2), job("b", stages=2))
    assert (c.job("a").state, c.job("b").state) == (STARTING, QUEUED)
    assert len(c.state.reservations) == 2


def test_what_a_tenant_submits_behind_the_head_does_not_eat_the_quota_that_the_head_waits_with():
    gpu = (("gpu", "a"),)
    c = cluster(2).feed(registration("g", 2, labels=gpu))
    c.state = replace(c.state, quotas={"t": 2})
    c.feed(job("other", tenant="u", node_selector=gpu)).run()
    c.feed(job("head", 2, tenant="t", node_selector=gpu), job("small", tenant="t"))
    assert c.job("small").pending_reason == "needs 1 slot, tenant t may hold 2 and holds 0, with 2 kept for head"
    c.feed(job("later", tenant="u", node_selector=gpu))
    assert c.job("later").state is QUEUED  # the slot is kept as well
    c.feed(events.CancelRequested("other")).empty(1)
    assert c.job("head").state is STARTING


def test_a_job_that_fits_nowhere_holds_up_nobody_of_its_tenant():
    c = cluster(4)
    c.state = replace(c.state, quotas={"t": 4})
    c.feed(job("s0", tenant="t"), job("never", 4, tenant="t", node_selector=(("gpu", "h100"),)), job("s1", tenant="t"))
    assert c.job("s1").state is STARTING
    assert c.job("never").pending_reason.startswith("needs 4 slots on nodes with gpu=h100")


def test_nobody_makes_room_that_is_only_enough_with_a_node_that_is_away():
    c = cluster(1, 1).feed(job("low")).run()
    away = {"n1": "n2", "n2": "n1"}[c.node_of(0)]
    c.feed(events.NodeDisconnected(away, 0), job("high", 2, priority=5))
    assert c.job("low").state is RUNNING
    assert c.job("high").pending_reason.endswith("next in line, after low")
    c.feed(registration(away, 1))
    assert c.job("low").state is JobState.PREEMPTING


def test_the_head_takes_other_slots_than_those_kept_for_it_where_lower_priorities_came_to_be():
    c = cluster(4, 2, 2).feed(job("a", 4)).run(1).feed(job("b1", 2)).run(2).feed(job("b2", 2)).run(3)
    c.feed(job("head", 4))
    kept = c.job("head").earmark
    assert {node_id for node_id, _slot in kept} == {"n1"}
    c.feed(job("l1", 2, priority=-5), job("l2", 2, priority=-5))
    for ended, fence in (("b1", 2), ("b2", 3)):
        c.feed(events.CancelRequested(ended)).empty(fence)
    assert (states(c)["l1"], states(c)["l2"]) == ("preempting", "queued")
    c.empty(fence_of(c, "l1"))
    assert c.job("head").state is STARTING


def test_the_highest_and_oldest_priorities_are_spared_where_fewer_suffice():
    c = cluster(1, 1, 3).feed(job("p0", priority=0)).run(1).feed(job("p1", priority=1)).run(2)
    c.feed(job("p2", 3, priority=2)).run(3).feed(job("high", 4, priority=9))
    assert [each for each, state in states(c).items() if state == "preempting"] == ["p0", "p2"]


def test_slots_of_an_attempt_that_is_over_but_can_not_be_killed_are_waited_for_by_nobody():
    c = cluster(1, 1).feed(submission("u", name="u", stages=1), submission("v", name="v", stages=1)).run(1).run(2)
    stuck = c.node_of(0, 1)
    c.feed(events.CancelRequested("u"), events.WorkerUnkillable(stuck, 1, 0))
    assert c.attempt(1).is_terminal
    c.feed(submission("head", name="head", stages=1, priority=9))
    assert c.job("head").earmark == ((c.node_of(0, 2), 0),)
    assert c.attempt(2).state is AttemptState.STOPPING
