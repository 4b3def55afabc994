"""What the engine must do after the commit, in the imperative. Every effect may be performed twice.

After a crash `pending` derives them again from the state; what nodes must know is no effect to repeat, since a node
gets its whole desired state when it connects.
"""

from __future__ import annotations

from dataclasses import dataclass

from piped.core.model import AttemptState, Record, State


@dataclass(frozen=True, slots=True)
class SendDesired:
    """Send the node its desired state, if its session is open."""

    node_id: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End the node's open session: it must register again."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ArmStartDeadline:
    """Post StartDeadlinePassed for the fence after so many seconds; replaces an earlier one of the fence."""

    fence: int
    after_s: int


@dataclass(frozen=True, slots=True)
class ArmDrainDeadline:
    """Post DrainDeadlinePassed for the node's drain of `at_s` after so many seconds; replaces an earlier one of that drain."""

    node_id: str
    at_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class ArmQuarantineEnd:
    """Post QuarantineEnded for the node's quarantine of `at_s` after so many seconds; replaces an earlier one of that one."""

    node_id: str
    at_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class ArmBackoffEnd:
    """Post BackoffEnded for the job's wait of `at_s` after so many seconds; replaces an earlier one of that wait."""

    job_id: str
    at_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class NotifyWatchers:
    """Tell those who watch the job that it changed."""

    job_id: str


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write one line of the event log, in the transaction itself."""

    record: Record


@dataclass(frozen=True, slots=True)
class PlaceQueued:
    """Apply PlacementDue before the commit; one pass serves all events of a transaction."""


Effect = (
    WriteRecord
    | PlaceQueued
    | SendDesired
    | CloseSession
    | ArmStartDeadline
    | ArmDrainDeadline
    | ArmQuarantineEnd
    | ArmBackoffEnd
    | NotifyWatchers
)

_STARTING = (AttemptState.RESERVED, AttemptState.PREPARING, AttemptState.PREPARED, AttemptState.COMMITTED)


def pending(state: State, now_s: float) -> tuple[Effect, ...]:
    """Return the effects that a coordinator which just loaded `state` must perform."""
    starting = [each for each in state.attempts.values() if each.state in _STARTING]
    nodes = state.nodes.values()
    return (
        *(ArmStartDeadline(each.fence, state.jobs[each.job_id].spec.start_timeout_s) for each in starting),
        *(ArmDrainDeadline(each.node_id, each.drain.at_s, each.drain.left_s(now_s)) for each in nodes if each.drain),
        *(
            ArmQuarantineEnd(each.node_id, each.quarantine.at_s, each.quarantine.left_s(now_s))
            for each in nodes
            if each.quarantine
        ),
        *(
            ArmBackoffEnd(each.job_id, each.backoff.at_s, each.backoff.left_s(now_s))
            for each in (state.jobs[job_id] for job_id in state.live_names.values())
            if each.backoff
        ),
    )
