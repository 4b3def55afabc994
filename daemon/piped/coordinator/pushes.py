"""Desired states as messages. An attempt of many nodes is written out once, not once for each of them.

A state never changes, so what was derived from one of its parts holds as long as that part is the same object. Called by
`coordinator.sessions` for each push.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeapi.v1 import nodes_pb2
from piped import wire
from piped.coordinator.links import LinkBoard
from piped.core import desired
from piped.core.model import Attempt, SlotKey, State

# The twins of messages that hold serialized ones: the same bytes, and nothing is copied field by field for each node.
Response, Desired = nodes_pb2.SerializedSessionResponse, nodes_pb2.SerializedDesiredState


class Pushes:
    """Remembers what the newest state came to."""

    def __init__(self, links: LinkBoard) -> None:
        self._links = links
        self._reservations: Mapping[SlotKey, int] | None = None
        self._fences: dict[str, list[int]] = {}
        self._written: dict[int, tuple[Attempt, int, bytes]] = {}  # by fence; the revision of the links that it has

    def message_for(self, state: State, node_id: str) -> nodes_pb2.SerializedSessionResponse:
        """Return the node's complete desired state, as a SessionResponse on the wire."""
        if self._reservations is not state.reservations:
            self._reservations, self._fences = state.reservations, desired.fences_by_node(state)
            held = set(state.reservations.values())
            self._written = {fence: kept for fence, kept in self._written.items() if fence in held}
        attempts = [self._written_out(state, fence) for fence in self._fences.get(node_id, ())]
        return Response(desired=Desired(desired_rev=state.event_seq, attempts=attempts).SerializeToString())

    def _written_out(self, state: State, fence: int) -> bytes:
        attempt, kept = state.attempts[fence], self._written.get(fence)
        is_prepared_now = desired.phase_of(attempt) is desired.Phase.PREPARE
        revision = self._links.revision if is_prepared_now else 0
        if kept is None or kept[0] is not attempt or kept[1] != revision:
            message = wire.desired_to_proto(desired.of_fence(state, fence))
            if is_prepared_now:
                message.peers.extend(self._links.peers(state, attempt))
            kept = self._written[fence] = attempt, revision, message.SerializeToString()
        return kept[2]
