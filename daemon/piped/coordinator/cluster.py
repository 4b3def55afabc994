"""What clients and operators call about the fleet. Reads the state, posts events, decides nothing.

A node is named by its id, or by its name, which means the live node of that name, else the one that was last known.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from pipeapi.v1 import cluster_pb2, cluster_pb2_grpc
from piped import wire
from piped.coordinator.engine import Engine
from piped.coordinator.sessions import NodeService
from piped.core import desired
from piped.core.events import CordonRequested, DrainRequested, Event, ForgetRequested, UncordonRequested
from piped.core.model import Node, NodeState, State
from piped.errors import FieldViolation, NotFoundError, SpecError

MAX_TEXT = 256
MAX_DRAIN_S = 7 * 86_400.0


def find_node(state: State, text: str, *, also_forgotten: bool = False) -> Node:
    """Return the node of that id, else the one of that name; one that was forgotten only `also_forgotten`, if no other has it.

    Raises SpecError for an empty text, NotFoundError with near names.
    """
    if not text:
        raise SpecError((FieldViolation("node", "is empty; give a node's name or id (pipectl get nodes)"),))
    if text in state.nodes:
        return state.nodes[text]
    known = [node for node in state.nodes.values() if node.state is not NodeState.FENCED]
    named = [node for node in known if node.node_name == text]
    if also_forgotten and not named:
        named = [node for node in state.nodes.values() if node.node_name == text]
    if named:
        return min(named, key=lambda node: node.is_gone)
    near = difflib.get_close_matches(text, {node.node_name for node in known}, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "see pipectl get nodes"
    raise NotFoundError(f"no node has the id or name {text!r}; {hint}")


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """The fleet, what operators do with it, and this coordinator's identity."""

    def __init__(self, engine: Engine, nodes: NodeService, *, version: str, http_address: str) -> None:
        self._engine, self._nodes = engine, nodes
        self._version, self._http_address = version, http_address

    async def ListNodes(
        self, _request: cluster_pb2.ListNodesRequest, _context: object
    ) -> cluster_pb2.ListNodesResponse:
        """List every node that was not forgotten, by name."""
        nodes = sorted(self._engine.state.nodes.values(), key=lambda each: (each.node_name, each.is_gone))
        shown = (each for each in nodes if each.state is not NodeState.FENCED)
        held = desired.fences_by_node(self._engine.state)
        return cluster_pb2.ListNodesResponse(nodes=[self._message(each.node_id, held) for each in shown])

    async def CordonNode(
        self, request: cluster_pb2.CordonNodeRequest, _context: object
    ) -> cluster_pb2.CordonNodeResponse:
        node_id = find_node(self._engine.state, request.node).node_id
        check_texts(who=request.who, why=request.why)
        return cluster_pb2.CordonNodeResponse(
            node=await self._after(CordonRequested(node_id, request.who, request.why), node_id)
        )

    async def UncordonNode(
        self, request: cluster_pb2.UncordonNodeRequest, _context: object
    ) -> cluster_pb2.UncordonNodeResponse:
        node_id = find_node(self._engine.state, request.node).node_id
        check_texts(who=request.who)
        return cluster_pb2.UncordonNodeResponse(
            node=await self._after(UncordonRequested(node_id, request.who), node_id)
        )

    async def DrainNode(self, request: cluster_pb2.DrainNodeRequest, _context: object) -> cluster_pb2.DrainNodeResponse:
        node_id = find_node(self._engine.state, request.node).node_id
        check_texts(who=request.who, why=request.why)
        if not 0 <= request.within_s <= MAX_DRAIN_S:
            text = f"is {request.within_s:g} s; it must be 0 to {MAX_DRAIN_S:.0f}"
            raise SpecError((FieldViolation("within_s", text),))
        event = DrainRequested(node_id, request.who, request.why, request.within_s)
        return cluster_pb2.DrainNodeResponse(node=await self._after(event, node_id))

    async def ForgetNode(
        self, request: cluster_pb2.ForgetNodeRequest, _context: object
    ) -> cluster_pb2.ForgetNodeResponse:
        node_id = find_node(self._engine.state, request.node, also_forgotten=True).node_id
        check_texts(who=request.who, why=request.why)
        return cluster_pb2.ForgetNodeResponse(
            node=await self._after(ForgetRequested(node_id, request.who, request.why), node_id)
        )

    async def GetVersion(
        self, _request: cluster_pb2.GetVersionRequest, _context: object
    ) -> cluster_pb2.GetVersionResponse:
        state = self._engine.state
        return cluster_pb2.GetVersionResponse(
            version=self._version,
            cluster_id=state.cluster_id,
            coordinator_epoch=state.epoch,
            http_address=self._http_address,
        )

    async def _after(self, event: Event, node_id: str) -> cluster_pb2.Node:
        await self._engine.post(event)
        return self._message(node_id, desired.fences_by_node(self._engine.state))

    def _message(self, node_id: str, fences: Mapping[str, list[int]]) -> cluster_pb2.Node:
        """Return what clients see of a node; `fences`: those that hold slots, by node."""
        state = self._engine.state
        attempts = (state.attempts[fence] for fence in fences.get(node_id, ()))
        held = ((attempt, state.jobs[attempt.job_id].spec.name) for attempt in attempts)
        message = wire.node_to_proto(state.nodes[node_id], held, lease_age_s=self._nodes.lease_age_s(node_id))
        return self._nodes.links.tell(state, message)


def check_texts(**texts: str) -> None:
    """Raise SpecError for a text that is missing where it must not be, or too long."""
    violations = [
        FieldViolation(name, f"has {len(t)} characters; the limit is {MAX_TEXT}")
        for name, t in texts.items()
        if len(t) > MAX_TEXT
    ]
    if not texts["who"].strip():
        violations.append(FieldViolation("who", "is empty; say who asks, so that others know whom to ask"))
    if violations:
        raise SpecError(tuple(violations))
