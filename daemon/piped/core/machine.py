"""The one door to every decision: state and event in, state, effects and reason out. Performs nothing.

Only `coordinator.engine` calls it. Time comes in as an argument, so any decision can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piped.core import attempts, events, jobs, maintenance, nodes, quarantine, queue, requests
from piped.core.draft import Draft
from piped.core.effects import Effect
from piped.core.model import State

Rule = Callable[[Draft, Any], str]

RULES: dict[type, Rule] = {
    events.CoordinatorStarted: nodes.coordinator_started,
    events.StoreRetried: nodes.store_retried,
    events.JobSubmitted: requests.submit,
    events.CancelRequested: requests.cancel,
    events.HoldRequested: queue.hold,
    events.ReleaseRequested: queue.release,
    events.CordonRequested: maintenance.cordon,
    events.UncordonRequested: maintenance.uncordon,
    events.DrainRequested: maintenance.drain,
    events.DrainDeadlinePassed: maintenance.drain_deadline_passed,
    events.ForgetRequested: maintenance.forget,
    events.QuarantineEnded: quarantine.ended,
    events.BackoffEnded: jobs.backoff_ended,
    events.ArtifactStored: requests.store_artifact,
    events.NodeRegistered: nodes.register,
    events.NodeDisconnected: nodes.disconnected,
    events.WiresMeasured: nodes.wires_measured,
    events.LeaseExpired: nodes.lease_expired,
    events.StartDeadlinePassed: attempts.start_deadline_passed,
    events.HangFound: attempts.hang_found,
    events.PlacementDue: queue.place_queued,
    events.AttemptPrepared: attempts.prepared,
    events.PrepareRefused: attempts.refused,
    events.StoreListened: attempts.store_listened,
    events.PlanReported: attempts.plan_reported,
    events.AttemptEmptied: attempts.emptied,
    events.WorkerSpawned: attempts.worker_fact,
    events.WorkerJoined: attempts.worker_fact,
    events.WorkerFailed: attempts.worker_fact,
    events.WorkerDone: attempts.worker_fact,
    events.WorkerExited: attempts.worker_fact,
    events.WorkerLost: attempts.worker_fact,
    events.WorkerUnkillable: attempts.worker_fact,
}


def apply(state: State, event: events.Event, *, now_s: float) -> tuple[State, tuple[Effect, ...], str]:
    """Return the state after `event`, the effects to perform once it is stored, and what was decided in words.

    The same state object comes back when nothing changed. Raises UserError or NodeError to refuse the event, and
    BugError when it would break a table or an invariant; the state is untouched in both cases.
    """
    draft = Draft(state, now_s)
    reason = RULES[type(event)](draft, event)
    after, effects = draft.finish()
    return after, effects, reason
