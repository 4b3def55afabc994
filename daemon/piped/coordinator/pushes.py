"""Desired states as messages. An attempt of many nodes is written out once, not once for each of them.

A state never changes, so what was derived from one of its parts holds as long as that part is the same object. Called by
`coordinator.sessions` for each push.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeapi.v1 import nodes_pb2
from piped import wire
from piped.core import desired
from piped.core.model import Attempt, SlotKey, State


class Pushes:
    """Remembers what the newest state came to."""

    def __init__(self) -> None:
        self._reservations: Mapping[SlotKey, int] | None = None
        self._fences: dict[str, list[int]] = {}
        self._written: dict[int, tuple[Attempt, nodes_pb2.DesiredAttempt]] = {}

    def message_for(self, state: State, node_id: str) -> nodes_pb2.SessionResponse:
        """Return the node's complete desired state."""
        if self._reservations is not state.reservations:
            self._reservations, self._fences = state.reservations, desired.fences_by_node(state)
            held = set(state.reservations.values())
            self._written = {fence: kept for fence, kept in self._written.items() if fence in held}
        attempts = [self._written_out(state, fence) for fence in self._fences.get(node_id, ())]
        message = nodes_pb2.DesiredState(desired_rev=state.event_seq, attempts=attempts)
        return nodes_pb2.SessionResponse(desired=message)

    def _written_out(self, state: State, fence: int) -> nodes_pb2.DesiredAttempt:
        kept = self._written.get(fence)
        if kept is None or kept[0] is not state.attempts[fence]:
            kept = state.attempts[fence], wire.desired_to_proto(desired.of_fence(state, fence))
            self._written[fence] = kept
        return kept[1]
