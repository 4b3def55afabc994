"""What one node must hold, derived from the state alone: every attempt that has slots reserved there.

Called by `coordinator.pushes` for each push, and by
`coordinator.cluster` for who holds what. An attempt leaves a node's desired state when the node has reported it
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


def fences_by_node(state: State) -> dict[str, list[int]]:
    """Return, ascending, the fences that hold slots of each node; nodes without any are left out."""
    held: dict[str, set[int]] = {}
    for (node_id, _slot), fence in state.reservations.items():
        held.setdefault(node_id, set()).add(fence)
    return {node_id: sorted(fences) for node_id, fences in held.items()}


def of_fence(state: State, fence: int) -> DesiredAttempt:
    """Return one attempt as its nodes shall have it."""
    attempt = state.attempts[fence]
    return DesiredAttempt(attempt, state.jobs[attempt.job_id].spec, phase_of(attempt))


def of_node(state: State, node_id: str) -> tuple[DesiredAttempt, ...]:
    """Return the node's complete desired state, by fence."""
    return tuple(of_fence(state, fence) for fence in fences_by_node(state).get(node_id, ()))


def phase_of(attempt: Attempt) -> Phase:
    """Return what the nodes of `attempt` shall do."""
    match attempt.state:
        case AttemptState.RESERVED | AttemptState.PREPARING | AttemptState.PREPARED:
            return Phase.PREPARE
        case AttemptState.COMMITTED | AttemptState.RUNNING:
            return Phase.RUN
        case _:
            return Phase.STOP
