"""Node lifecycle: registering, disconnecting and losing nodes.

Absence stops nothing: a lost node only gets no new work, and what ran on it goes on until a fact says otherwise.
Called by `machine` alone.
"""

from __future__ import annotations

from dataclasses import replace

from piped.core import attempts, events
from piped.core.draft import Draft
from piped.core.effects import CloseSession, SendDesired
from piped.core.model import AttemptState, Cordon, Node, NodeState, wire_between
from piped.errors import IllegalTransition, RegistrationRefused, StoreRolledBack

NEXT: dict[NodeState, frozenset[NodeState]] = {  # what is not in a row is illegal, and raises
    NodeState.READY: frozenset({NodeState.READY, NodeState.DISCONNECTED, NodeState.LOST}),
    NodeState.DISCONNECTED: frozenset({NodeState.READY, NodeState.LOST}),
    NodeState.LOST: frozenset({NodeState.READY, NodeState.FENCED}),
    NodeState.FENCED: frozenset({NodeState.READY}),
}
ROLLBACK_LIFT = 1_000_000  # more fences, epochs and events than a lost part of a store can have had
_STARTED = (AttemptState.COMMITTED, AttemptState.RUNNING)


def move(node: Node, to: NodeState) -> Node:
    """Return `node` in state `to`. Raises IllegalTransition when NEXT has no such step."""
    if to not in NEXT[node.state]:
        raise IllegalTransition(f"node {node.node_name}: {node.state.value} -> {to.value} is not allowed")
    return replace(node, state=to)


def register(draft: Draft, event: events.NodeRegistered) -> str:
    """Take the node in, or take it back with what it still runs.

    Within its lease the same host replaces its own session and keeps its incarnation; after the lease it gets a new
    one. Raises RegistrationRefused for another cluster, a store older than the fleet, a cloned image, a name or a data address
    in use.
    """
    _refuse_strangers(draft, event)
    known = draft.nodes.get(event.node_id)
    is_live = known is not None and not known.is_gone
    if known is not None and is_live and known.host_key != event.host_key:
        raise RegistrationRefused(
            f"node id {event.node_id} is held by a live node {known.node_name!r} on another host "
            f"({known.host_key}); a copied state directory? Remove node_id from the copy, or wait for the lease to end"
        )
    incarnation = 1 if known is None else known.incarnation if is_live else known.incarnation + 1
    state = NodeState.READY if known is None else move(known, NodeState.READY).state
    node = Node(
        event.node_id,
        event.node_name,
        event.host_key,
        incarnation,
        state,
        event.version,
        event.data_address,
        event.metrics_address,
        event.slots,
        event.session,
        labels=event.labels,
        cordon=(known.cordon if known is not None else None) or _cordon_for_strangers(draft, event),
        drain=known.drain if known is not None else None,
        strikes=known.strikes if known is not None else (),
        quarantine=known.quarantine if known is not None else None,
    )
    draft.put_node(node)
    draft.record(
        "node_registered",
        f"incarnation {incarnation}, {len(event.slots)} slots" + (", session replaced" if is_live else ""),
        node_name=node.node_name,
    )
    if known is not None and known.state is NodeState.FENCED:
        _take_back_slots(draft, event)
    _compare(draft, event)
    draft.place_queued()
    draft.add_effect(SendDesired(node.node_id))
    return "registered"


def disconnected(draft: Draft, event: events.NodeDisconnected) -> str:
    node = draft.nodes.get(event.node_id)
    if node is None or node.state is not NodeState.READY:
        return "the registration is over"
    if node.session != event.session:  # the news of an old stream's end came after the registration on the new one
        return f"session {event.session} was replaced by session {node.session}"
    draft.put_node(move(node, NodeState.DISCONNECTED))
    draft.record("node_disconnected", "its session ended; the lease runs on", node_name=node.node_name)
    return "disconnected"


def wires_measured(draft: Draft, event: events.WiresMeasured) -> str:
    """Take the newest measurement; placement prefers fast wires."""
    for peer_id, bytes_per_s in event.bytes_per_s:
        wire = wire_between(event.node_id, peer_id)
        if {event.node_id, peer_id} <= draft.nodes.keys() and draft.wires.get(wire) != bytes_per_s:
            draft.put_wire(wire, bytes_per_s)
    return "measured"


def lease_expired(draft: Draft, event: events.LeaseExpired) -> str:
    node = draft.nodes.get(event.node_id)
    if node is None or node.incarnation != event.incarnation or node.is_gone:
        return "the registration is over"
    draft.put_node(move(node, NodeState.LOST))
    draft.record("node_lost", "its lease ran out; it gets no new work", node_name=node.node_name)
    draft.add_effect(CloseSession(node.node_id, "the lease ran out"))
    draft.place_queued()
    attempts.node_lost(draft, node.node_id)
    return "lost"


def coordinator_started(draft: Draft, event: events.CoordinatorStarted) -> str:
    """Note that no session of an earlier process is open; leave the numbers behind that an older store has lost."""
    if event.accepts_rollback:
        draft.lift(ROLLBACK_LIFT)
        draft.record(
            "rollback_accepted", f"epoch {draft.epoch}, fences above {draft.last_fence}: what came after is lost"
        )
    for node in list(draft.nodes.values()):
        if node.state is NodeState.READY:
            draft.put_node(move(node, NodeState.DISCONNECTED))
    draft.record("coordinator_started", f"epoch {draft.epoch}")
    draft.place_queued()
    return f"epoch {draft.epoch}"


def store_retried(draft: Draft, _event: events.StoreRetried) -> str:
    draft.record("store_writable", "it refused to be written and is written again")
    return "store writable"


def _refuse_strangers(draft: Draft, event: events.NodeRegistered) -> None:
    if event.cluster_id and event.cluster_id != draft.cluster_id:
        raise RegistrationRefused(
            f"node {event.node_name!r} belongs to cluster {event.cluster_id}, this is cluster {draft.cluster_id}; "
            "point it at its own coordinator, or give it an empty state directory"
        )
    if event.highest_epoch > draft.epoch or event.highest_fence > draft.last_fence:
        refusal = StoreRolledBack if event.cluster_id else RegistrationRefused  # a stranger's word proves nothing
        raise refusal(
            f"node {event.node_name!r} has seen epoch {event.highest_epoch} and fence {event.highest_fence}, this "
            f"store knows only epoch {draft.epoch} and fence {draft.last_fence}: the coordinator's store is older "
            "than its fleet; start the coordinator on its newest state directory, or, if that is lost, once with "
            "--accept-rollback: jobs submitted since are unknown then, and nodes on which such still run are cordoned"
        )
    if not event.node_id or not event.node_name or not event.slots:
        raise RegistrationRefused("a node needs an id, a name and at least one slot")
    for other in draft.nodes.values():
        if other.node_name == event.node_name and other.node_id != event.node_id and not other.is_gone:
            raise RegistrationRefused(
                f"the name {event.node_name!r} is held by the live node {other.node_id} ({other.host_key}); "
                "give this node another name"
            )
        if _share_an_address(other, event):
            raise RegistrationRefused(
                f"the nodes {event.node_name!r} and {other.node_name!r} have the same data_address {event.data_address} on two "
                f"hosts (boots {event.boot} and {other.boot}): workers would reach the wrong one; give each "
                "node the address of its own host"
            )


def _share_an_address(other: Node, event: events.NodeRegistered) -> bool:
    """Return whether a live node of another host has the same address; loopback is each host's own."""
    if other.node_id == event.node_id or other.is_gone or other.data_address != event.data_address:
        return False
    is_loopback = event.data_address.startswith("127.") or event.data_address in ("localhost", "::1")
    return not is_loopback and other.boot != event.boot


def _cordon_for_strangers(draft: Draft, event: events.NodeRegistered) -> Cordon | None:
    """Have nothing placed beside attempts that run on the node and that the store doesn't know."""
    unknown = [each.fence for each in event.attempts if each.is_shim_alive and each.fence not in draft.attempts]
    if not unknown:
        return None
    fences = ", ".join(map(str, sorted(unknown)))
    draft.record("unknown_attempts", f"fences {fences} run there and are not in the store", node_name=event.node_name)
    return Cordon(
        "coordinator",
        f"runs attempts that the store doesn't know (fences {fences}); let them end or kill their shims "
        "(attempts/FENCE/shim.json on the node), then uncordon",
        draft.now_s,
    )


def _take_back_slots(draft: Draft, event: events.NodeRegistered) -> None:
    """A node that was said to be gone returns with attempts: they hold its slots again until it reports them empty.

    Nothing was placed on it meanwhile, so its slots are free; the attempts are over or stopping, so it is told STOP.
    """
    for observed in event.attempts:
        attempt = draft.attempts.get(observed.fence)
        if attempt is None or not observed.is_shim_alive:
            continue
        for each in attempt.placement:
            if each.node_id == event.node_id:
                draft.reserve((each.node_id, each.slot.index), attempt.fence)
        draft.record("slots_held_again", f"fence {attempt.fence} is still there", node_name=event.node_name)


def _compare(draft: Draft, event: events.NodeRegistered) -> None:
    """Find the started attempts of which the node holds nothing any more, and wait again for those that stop."""
    observed = {each.fence for each in event.attempts}
    for fence in {holder for key, holder in draft.reservations.items() if key[0] == event.node_id}:
        attempt = draft.attempts[fence]
        if attempt.state in _STARTED and fence not in observed:
            attempts.lose_ranks(draft, attempt, event.node_id)
        elif attempt.state is AttemptState.STOPPING:
            attempts.settle(draft, attempt)  # it is waited for again, no more given up
