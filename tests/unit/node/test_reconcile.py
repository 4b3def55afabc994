"""Desired against observed, as sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piped.node.model import (
    Abandon,
    DesiredAttempt,
    DesiredState,
    Dismiss,
    Observed,
    PassEndpoint,
    Phase,
    Prepare,
    RankPlacement,
    Report,
    Shim,
    Slot,
    StartRanks,
    StopRanks,
)
from piped.node.reconcile import accept, reconcile

MINE = RankPlacement(0, 0, (0,), "me", "n1", Slot(0, "cpu:0"))
OTHERS = RankPlacement(1, 0, (1,), "other", "n2", Slot(0, "cpu:0"))
WANTED = DesiredAttempt(7, "j1", 1, Phase.RUN, ranks=(MINE, OTHERS))
IDLE = Observed(7, "j1", Shim.CONNECTED)
RUNNING = replace(IDLE, started=frozenset({0}))
OVER = replace(RUNNING, exited=frozenset({0}))


def decide(attempt: DesiredAttempt | None, seen: Observed | None) -> tuple[object, ...]:
    desired = DesiredState(3, (attempt,) if attempt else ())
    return reconcile(desired, {7: seen} if seen else {}, "me")


def phase(phase: Phase, **changes: object) -> DesiredAttempt:
    return replace(WANTED, phase=phase, **changes)  # type: ignore[arg-type]


def test_absence_stops_nothing() -> None:
    assert decide(None, RUNNING) == ()
    assert reconcile(None, {7: RUNNING}, "me") == ()


def test_a_lower_revision_is_ignored_but_a_new_coordinator_counts_afresh() -> None:
    newest = DesiredState(9, epoch=2)
    assert accept(newest, DesiredState(8, epoch=2)) == (newest, "ignored revision 8: 9 is newer")
    assert accept(newest, DesiredState(9, epoch=1))[0] is newest
    assert accept(newest, DesiredState(1, epoch=3))[0] == DesiredState(1, epoch=3)
    assert accept(None, newest)[0] is newest


@pytest.mark.parametrize("wanted", [Phase.PREPARE, Phase.RUN])
def test_an_unknown_attempt_is_prepared_first(wanted: Phase) -> None:
    assert decide(phase(wanted), None) == (Prepare(phase(wanted)),)


def test_a_connected_shim_means_prepared() -> None:
    assert decide(phase(Phase.PREPARE), IDLE) == (Report(7, None, "prepared"),)


def test_a_preparation_that_failed_is_not_tried_again() -> None:
    for shim in (Shim.NEVER, Shim.GONE):
        assert decide(phase(Phase.PREPARE), Observed(7, "j1", shim, preparation_failed=True)) == ()


def test_only_this_nodes_ranks_that_never_started_are_started() -> None:
    assert StartRanks(WANTED, (MINE,)) in decide(WANTED, IDLE)
    assert not any(isinstance(action, StartRanks) for action in decide(WANTED, RUNNING))
    assert not any(isinstance(action, StartRanks) for action in decide(WANTED, OVER))


def test_the_endpoint_goes_to_ranks_that_run() -> None:
    wanted = replace(WANTED, store_endpoint="a:1")
    assert PassEndpoint(7, (0,), "a:1") in decide(wanted, RUNNING)
    assert not any(isinstance(action, PassEndpoint) for action in decide(wanted, OVER))


@pytest.mark.parametrize("wanted", [Phase.PREPARE, Phase.RUN])
def test_an_attempt_never_gets_a_second_shim(wanted: Phase) -> None:
    gone = replace(RUNNING, shim=Shim.GONE)
    assert decide(phase(wanted), gone) == (Report(7, 0, "rank_lost"),)


def test_a_rank_with_an_exit_record_is_not_lost() -> None:
    assert decide(WANTED, replace(OVER, shim=Shim.GONE)) == ()


def test_stop_is_told_once_and_again_only_for_less_grace() -> None:
    wanted = phase(Phase.STOP, grace_s=30.0, stop_trigger="cancel")
    assert decide(wanted, RUNNING) == (StopRanks(7, 30.0, "cancel"),)
    told = replace(RUNNING, told_grace_s=30.0)
    assert decide(wanted, told) == ()
    assert decide(replace(wanted, grace_s=0.0), told) == (StopRanks(7, 0.0, "cancel"),)


def test_stop_dismisses_a_shim_that_never_started_a_rank() -> None:
    assert decide(phase(Phase.STOP), IDLE) == (StopRanks(7, 0.0, ""), Dismiss(7))
    assert decide(phase(Phase.STOP), replace(IDLE, told_grace_s=0.0)) == (Dismiss(7),)


def test_stop_gives_up_a_preparation_under_way() -> None:
    assert decide(phase(Phase.STOP), Observed(7, "j1", Shim.STARTING)) == (Abandon(7),)


def test_an_attempt_without_a_shim_is_empty() -> None:
    assert decide(phase(Phase.STOP), None) == (Report(7, None, "attempt_empty"),)
    gone = replace(RUNNING, shim=Shim.GONE)
    assert decide(phase(Phase.STOP), gone) == (Report(7, 0, "rank_lost"), Report(7, None, "attempt_empty"))


def test_a_shim_leaves_when_every_exit_is_with_the_coordinator_wanted_or_not() -> None:
    assert decide(None, OVER) == (Dismiss(7),)
    assert decide(None, replace(OVER, exits_acknowledged=False)) == ()
    assert decide(None, IDLE) == ()
