"""What nodes say of their wires and clocks, and where they answer each other's calls. Shown and passed on; wires also decide
between equal nodes (`core.placement`).

Not stored: a node says it all again in its next session. Written by `sessions`; read by `pushes` and `cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeapi.v1 import cluster_pb2, nodes_pb2
from piped.core.model import Attempt, State


@dataclass(slots=True)
class _Links:
    probe_address: str
    clock: tuple[float, float] | None = None  # (ahead of ours, ±)
    edges: dict[str, tuple[float, float]] = field(default_factory=dict)  # by the other node's id: (rtt_s, bytes_per_s)


class LinkBoard:
    """The newest word of every node that has registered since the start."""

    def __init__(self) -> None:
        self._links: dict[str, _Links] = {}
        self.revision = 0  # counts registrations: addresses may have changed

    def register(self, node_id: str, hello: nodes_pb2.Hello) -> None:
        """A session begins; what the node said in an earlier one is forgotten."""
        self._links[node_id] = _Links(hello.probe_address)
        self.revision += 1

    def beat(self, node_id: str, beat: nodes_pb2.Beat) -> None:
        """Take what a beat says."""
        links = self._links.setdefault(node_id, _Links(""))
        if beat.HasField("clock_offset_s"):
            links.clock = beat.clock_offset_s, beat.clock_error_s
        for edge in beat.edges:
            links.edges[edge.peer_node_id] = edge.rtt_s, edge.bytes_per_s

    def clock(self, node_id: str) -> tuple[float, float] | None:
        """Return how far the node's wall clock is ahead of ours, and the error of that, in seconds; None: not known yet."""
        links = self._links.get(node_id)
        return links.clock if links else None

    def peers(self, state: State, attempt: Attempt) -> list[nodes_pb2.Peer]:
        """Return the nodes of an attempt, for each other."""
        nodes = (state.nodes[node_id] for node_id in attempt.node_ids)
        return [
            nodes_pb2.Peer(
                node_id=node.node_id,
                node_name=node.node_name,
                data_address=node.data_address,
                probe_address=links.probe_address if (links := self._links.get(node.node_id)) else "",
            )
            for node in nodes
        ]

    def tell(self, state: State, message: cluster_pb2.Node) -> cluster_pb2.Node:
        """Complete what clients see of a node."""
        if (links := self._links.get(message.node_id)) is None:
            return message
        if links.clock is not None:
            message.clock_offset_s, message.clock_error_s = links.clock
        for peer_id, (rtt_s, bytes_per_s) in links.edges.items():
            if peer_id in state.nodes:
                peer = state.nodes[peer_id].node_name
                message.edges.add(node_name=peer, rtt_s=rtt_s, bytes_per_s=bytes_per_s)
        return message
