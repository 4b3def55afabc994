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
        self._written: dict[int, tuple[Attempt, bytes]] = {}

    def message_for(self, state: State, node_id: str) -> nodes_pb2.SerializedSessionResponse:
        """Return the node's complete desired state, as a SessionResponse on the wire."""
        if self._reservations is not state.reservations:
            self._reservations, self._fences = state.reservations, desired.fences_by_node(state)
            held = set(state.reservations.values())
            self._written = {fence: kept for fence, kept in self._written.items() if fence in held}
        attempts = [self._written_out(state, fence) for fence in self._fences.get(node_id, ())]
        return Response(desired=Desired(desired_rev=state.event_seq, attempts=attempts).SerializeToString())

    def _written_out(self, state: State, fence: int) -> bytes:
        kept = self._written.get(fence)
        if kept is None or kept[0] is not state.attempts[fence]:
            wanted = desired.of_fence(state, fence)
            message = wire.desired_to_proto(wanted)
            if wanted.phase is desired.Phase.PREPARE:
                message.peers.extend(self._links.peers(state, wanted.attempt))
            kept = wanted.attempt, message.SerializeToString()
            self._written[fence] = kept
        return kept[1]
