"""Desired against observed: decides what the node does next; performs nothing.

Absence stops nothing: an attempt that the coordinator does not mention is left alone. Every action may be asked for
again after a crash, so performing one twice must do no harm. Only piped.node.supervisor calls this.
"""

from __future__ import annotations

from collections.abc import Mapping

from piped.node.model import (
    Abandon,
    Action,
    DesiredAttempt,
    DesiredState,
    Dismiss,
    Observed,
    PassEndpoint,
    Phase,
    Prepare,
    Report,
    Shim,
    StartRanks,
    StopRanks,
)


def accept(current: DesiredState | None, new: DesiredState) -> tuple[DesiredState, str]:
    """Return the desired state to act on, and why; a lower revision of the same or an older epoch is ignored."""
    if current is not None and (new.epoch, new.desired_rev) < (current.epoch, current.desired_rev):
        return current, f"ignored revision {new.desired_rev}: {current.desired_rev} is newer"
    return new, f"revision {new.desired_rev}"


def reconcile(desired: DesiredState | None, observed: Mapping[int, Observed], node_id: str) -> tuple[Action, ...]:
    """Return the actions that bring this node closer to `desired`, by fence."""
    wanted = {attempt.fence: attempt for attempt in desired.attempts} if desired else {}
    actions: list[Action] = []
    for fence in sorted(wanted.keys() | observed.keys()):
        attempt, seen = wanted.get(fence), observed.get(fence)
        if attempt is not None:
            actions += _advance(attempt, seen or Observed(fence, attempt.job_id, Shim.NEVER), node_id)
        if seen is not None:
            actions += _settle(seen)
    return tuple(actions)


def _advance(attempt: DesiredAttempt, seen: Observed, node_id: str) -> list[Action]:
    match attempt.phase:
        case Phase.STOP:
            return _stop(attempt, seen)
        case _ if seen.preparation_failed:
            return []
        case Phase.PREPARE | Phase.RUN if seen.shim is Shim.NEVER:
            return [Prepare(attempt)]
        case Phase.PREPARE if seen.shim is Shim.CONNECTED:
            return [Report(attempt.fence, None, "prepared")]
        case Phase.RUN if seen.shim is Shim.CONNECTED:
            return _run(attempt, seen, node_id)
        case Phase.PREPARE | Phase.RUN if seen.shim is Shim.GONE:
            lost = [r.rank for r in attempt.ranks_on(node_id) if r.rank not in seen.exited]
            return [Report(attempt.fence, rank, "rank_lost") for rank in lost]
    return []


def _run(attempt: DesiredAttempt, seen: Observed, node_id: str) -> list[Action]:
    mine = attempt.ranks_on(node_id)
    actions: list[Action] = [Report(attempt.fence, None, "prepared")]
    if missing := tuple(placement for placement in mine if placement.rank not in seen.started):
        actions.append(StartRanks(attempt, missing))
    if attempt.store_endpoint:
        running = tuple(p.rank for p in mine if p.rank not in seen.exited)
        if running:
            actions.append(PassEndpoint(attempt.fence, running, attempt.store_endpoint))
    return actions


def _stop(attempt: DesiredAttempt, seen: Observed) -> list[Action]:
    fence = attempt.fence
    match seen.shim:
        case Shim.NEVER:
            return [Report(fence, None, "attempt_empty")]
        case Shim.GONE:
            lost = [Report(fence, rank, "rank_lost") for rank in sorted(seen.started - seen.exited)]
            return [*lost, Report(fence, None, "attempt_empty")]
        case Shim.STARTING:
            return [Abandon(fence)]
        case Shim.CONNECTED if seen.told_grace_s is None or attempt.grace_s < seen.told_grace_s:
            stop = StopRanks(fence, attempt.grace_s, attempt.stop_trigger, attempt.dumps_stacks)
            return [stop] if seen.started else [stop, Dismiss(fence)]  # no exit will follow that could ask for it
        case Shim.CONNECTED if not seen.started:
            return [Dismiss(fence)]
    return []


def _settle(seen: Observed) -> list[Action]:
    """A shim whose work is done and known leaves, wanted or not: nothing is stopped by it."""
    is_done = bool(seen.started) and seen.started <= seen.exited
    if seen.shim is Shim.CONNECTED and is_done and seen.exits_acknowledged:
        return [Dismiss(seen.fence)]
    return []
