"""Strikes and quarantine: a node that can't prepare attempts gets no more of them for a while.

A refusal or a timeout while preparing is a strike, one per job, where it is known to be the node's fault and not the job's
(`retries` finds out); an attempt that was prepared everywhere clears its nodes. After the quarantine one more strike
suffices. Called by `retries` (strikes), `attempts` (clears them), `machine` (the end).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from piped.core import events
from piped.core.draft import Draft
from piped.core.effects import ArmQuarantineEnd
from piped.core.model import Quarantine

MAX_STRIKES = 3  # jobs in a row
QUARANTINE_S = 600.0


def strike(draft: Draft, node_id: str, job_id: str, why: str) -> None:
    """Count a job that the node could not prepare; the last strike closes the node."""
    node = draft.nodes[node_id]
    if job_id in node.strikes:
        return
    strikes = (*node.strikes, job_id)
    draft.put_node(replace(node, strikes=strikes))
    draft.record("node_strike", f"{len(strikes)} of {MAX_STRIKES}: {why}", job_id=job_id, node_name=node.node_name)
    if len(strikes) >= MAX_STRIKES and node.quarantine is None:
        put_away = Quarantine(
            f"{len(strikes)} jobs in a row could not be prepared, the last: {why}", draft.now_s, QUARANTINE_S
        )
        draft.put_node(replace(node, strikes=strikes, quarantine=put_away))
        told = f"no new work for {QUARANTINE_S:g} s (pipectl uncordon ends it): {put_away.why}"
        draft.record("node_quarantined", told, node_name=node.node_name)
        draft.add_effect(ArmQuarantineEnd(node_id, draft.now_s, QUARANTINE_S))


def clear(draft: Draft, node_ids: Iterable[str]) -> None:
    """Forget the strikes of nodes that have prepared an attempt."""
    for node in (draft.nodes[node_id] for node_id in node_ids):
        if node.strikes and node.quarantine is None:
            draft.put_node(replace(node, strikes=()))


def ended(draft: Draft, event: events.QuarantineEnded) -> str:
    """Open the node again, on probation: one strike is left."""
    node = draft.nodes.get(event.node_id)
    if node is None or node.quarantine is None or node.quarantine.at_s != event.at_s:
        return "it is over already"
    draft.put_node(replace(node, quarantine=None, strikes=node.strikes[-(MAX_STRIKES - 1) :]))
    draft.record("quarantine_ended", "one strike is left", node_name=node.node_name)
    draft.place_queued()
    return "open"
