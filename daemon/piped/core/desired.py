"""What one node must hold, derived from the state alone: every attempt that has slots reserved there.

Called by `coordinator.sessions` for each push. An attempt leaves a node's desired state when the node has reported it
empty; until then an ended attempt asks for STOP.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from piped.core.model import Attempt, AttemptState, JobSpec, State


class Phase(StrEnum):
    PREPARE = "prepare"
    RUN = "run"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class DesiredAttempt:
    """One attempt as its nodes shall have it."""

    attempt: Attempt
    spec: JobSpec
    phase: Phase


def of_node(state: State, node_id: str) -> tuple[DesiredAttempt, ...]:
    """Return the node's complete desired state, by fence."""
    fences = sorted({fence for (holder, _slot), fence in state.reservations.items() if holder == node_id})
    attempts = (state.attempts[fence] for fence in fences)
    return tuple(DesiredAttempt(each, state.jobs[each.job_id].spec, phase_of(each)) for each in attempts)


def phase_of(attempt: Attempt) -> Phase:
    """Return what the nodes of `attempt` shall do."""
    match attempt.state:
        case AttemptState.RESERVED | AttemptState.PREPARING | AttemptState.PREPARED:
            return Phase.PREPARE
        case AttemptState.COMMITTED | AttemptState.RUNNING:
            return Phase.RUN
        case _:
            return Phase.STOP
