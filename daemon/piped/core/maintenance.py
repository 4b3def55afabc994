"""What operators ask of nodes: cordon, uncordon, drain, forget.

A cordoned or drained node keeps its session and its work, and gets nothing new. A drain is done when every attempt has
left the node, never earlier. Called by `machine` alone.
"""

from __future__ import annotations

from dataclasses import replace

from piped.core import attempts, events, nodes
from piped.core.draft import Draft
from piped.core.effects import ArmDrainDeadline
from piped.core.model import Attempt, AttemptState, Cordon, Drain, Node, NodeState
from piped.errors import NotFoundError, WrongStateError


def cordon(draft: Draft, event: events.CordonRequested) -> str:
    """Give the node no new work. The newest reason counts; the log keeps the one before."""
    node = _node(draft, event.node_id)
    draft.put_node(replace(node, cordon=Cordon(event.who, event.why, draft.now_s)))
    before = f" (before: {_told(node.cordon.who, node.cordon.why)})" if node.cordon is not None else ""
    draft.record("node_cordoned", _told(event.who, event.why) + before, node_name=node.node_name)
    draft.place_queued()  # reasons to wait change
    return "cordoned"


def uncordon(draft: Draft, event: events.UncordonRequested) -> str:
    """Open the node to new work again: ends cordon, drain and quarantine. What was stopped already stays stopped."""
    node = _node(draft, event.node_id)
    if not node.closed_because:
        return "it is open already"
    draft.put_node(replace(node, cordon=None, drain=None, quarantine=None, strikes=()))
    draft.record("node_uncordoned", _told(event.who, f"was {node.closed_because}"), node_name=node.node_name)
    draft.place_queued()
    return "open"


def drain(draft: Draft, event: events.DrainRequested) -> str:
    """Empty the node: nothing new, what has not started goes elsewhere at once, the rest may go on until the deadline.

    The newest request counts, so that a deadline can be moved. Raises WrongStateError for a node that was forgotten.
    """
    node = _node(draft, event.node_id)
    if node.state is NodeState.FENCED:
        raise WrongStateError(
            f"node {node.node_name} was forgotten: there is nothing to drain until it registers again"
        )
    was_done = node.drain is not None and not _attempts_on(draft, event.node_id)
    node = replace(node, drain=Drain(event.who, event.why, draft.now_s, event.within_s))
    draft.put_node(node)
    told = f"{_told(event.who, event.why)}; what runs there is stopped in {event.within_s:g} s"
    if node.state is NodeState.LOST and _attempts_on(draft, event.node_id):
        told += f"; {node.node_name} is lost: it must come back and report, or pipectl forget ends the drain"
    draft.record("node_draining", told, node_name=node.node_name)
    for attempt in _attempts_on(draft, event.node_id):
        if attempt.state is AttemptState.PREPARING or not event.within_s:
            attempts.preempt(draft, attempt, f"node {node.node_name} is {node.closed_because}")
    if event.within_s:
        draft.add_effect(ArmDrainDeadline(event.node_id, draft.now_s, event.within_s))
    if not was_done and not _attempts_on(draft, event.node_id):
        attempts.note_drained(draft, event.node_id)
    draft.place_queued()
    return "draining"


def drain_deadline_passed(draft: Draft, event: events.DrainDeadlinePassed) -> str:
    """Stop with grace what is still on the node; the jobs go back to the queue."""
    node = draft.nodes.get(event.node_id)
    if node is None or node.drain is None or node.drain.at_s != event.at_s:
        return "the drain was called off, or has another deadline"
    left = _attempts_on(draft, event.node_id)
    for attempt in left:
        attempts.preempt(draft, attempt, f"node {node.node_name} is {node.closed_because}")
    return f"{len(left)} attempts were still there"


def forget(draft: Draft, event: events.ForgetRequested) -> str:
    """Free the slots of a LOST node; ranks that had not ended are gone, and their jobs start anew. Ends a drain.

    Raises WrongStateError for a node that may still be there. If it comes back all the same, its attempts hold its slots
    again until it has stopped them.
    """
    node = _node(draft, event.node_id)
    if node.state is NodeState.FENCED:
        return "it is forgotten already"
    if node.state is not NodeState.LOST:
        raise WrongStateError(
            f"node {node.node_name} is {node.state.value}, not lost: only a node whose machine is gone for good may be "
            f"forgotten, since what runs there would go on unseen; use pipectl drain {node.node_name}, or stop its "
            "machine and wait until its lease has ended"
        )
    draft.put_node(nodes.move(node, NodeState.FENCED))
    draft.record("node_forgotten", _told(event.who, event.why), node_name=node.node_name)
    left = _attempts_on(draft, event.node_id)
    if node.drain is not None and left:
        told = "forgotten; whether anything still runs there is not known"
        draft.record("node_drained", told, node_name=node.node_name)
    for attempt in left:
        draft.release(event.node_id, attempt.fence)
        if attempt.state in (AttemptState.COMMITTED, AttemptState.RUNNING):
            attempts.lose_ranks(draft, attempt, event.node_id)
        else:
            attempts.settle(draft, attempt)
    draft.place_queued()
    return "forgotten"


def _attempts_on(draft: Draft, node_id: str) -> list[Attempt]:
    """Return the attempts that hold slots of the node, by fence."""
    fences = sorted({fence for (holder, _slot), fence in draft.reservations.items() if holder == node_id})
    return [draft.attempts[fence] for fence in fences]


def _node(draft: Draft, node_id: str) -> Node:
    node = draft.nodes.get(node_id)
    if node is None:
        raise NotFoundError(f"no node has the id {node_id!r}; see pipectl get nodes")
    return node


def _told(who: str, why: str) -> str:
    return f"by {who}: {why}" if why else f"by {who}"
