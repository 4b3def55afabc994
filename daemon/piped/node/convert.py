"""Messages of pipeapi.v1 <-> the node's own types; the only module here, beside the rpc edges, that knows protobuf.

Called by piped.node.session and piped.node.bulk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from pipeapi import jobproto
from pipeapi.v1 import cluster_pb2, jobs_pb2, nodes_pb2
from piped.node.model import (
    DesiredAttempt,
    DesiredState,
    Edge,
    Fact,
    FactKey,
    Observed,
    Peer,
    Phase,
    RankPlacement,
    Shim,
    Slot,
)

_PHASES = {
    nodes_pb2.PHASE_PREPARE: Phase.PREPARE,
    nodes_pb2.PHASE_RUN: Phase.RUN,
    nodes_pb2.PHASE_STOP: Phase.STOP,
}
_FACT_FIELDS = {field.name: field.number for field in nodes_pb2.Fact.DESCRIPTOR.oneofs_by_name["fact"].fields}
DRIFT = 50e-6  # by which two boot clocks may part, at most
_FACT_NAMES = {number: name for name, number in _FACT_FIELDS.items()}
_FLOATS = ("loss", "tokens_per_s", "step_s")


def desired_state(message: nodes_pb2.DesiredState, epoch: int) -> DesiredState:
    """Return what `message` wants; an attempt in a phase that this version does not know is left alone."""
    attempts = tuple(_desired_attempt(item) for item in message.attempts if item.phase in _PHASES)
    return DesiredState(message.desired_rev, attempts, epoch)


def _desired_attempt(item: nodes_pb2.DesiredAttempt) -> DesiredAttempt:
    return DesiredAttempt(
        fence=item.fence,
        job_id=item.job_id,
        attempt=item.attempt,
        phase=_PHASES[item.phase],
        spec=jobproto.to_dict(item.spec),
        env=dict(item.spec.env),
        ranks=tuple(_placement(rank) for rank in item.ranks),
        store_endpoint=item.store_endpoint,
        grace_s=item.grace_s,
        stop_trigger=item.stop_trigger,
        peers=tuple(Peer(each.node_id, each.node_name, each.data_address, each.probe_address) for each in item.peers),
        dumps_stacks=item.dump_stacks,
    )


def _placement(rank: nodes_pb2.RankPlacement) -> RankPlacement:
    slot = Slot(rank.slot.index, rank.slot.device, rank.slot.uuid)
    return RankPlacement(rank.rank, rank.replica, tuple(rank.stages), rank.node_id, rank.node_name, slot)


def fact_message(fact: Fact, boot_offset: tuple[float, float] | None = None, *, now_ns: int = 0) -> nodes_pb2.Fact:
    """Return `fact` as a message. Raises ValueError when its body does not fit, e.g. a plan of another version.

    `boot_offset`: this boot clock minus the coordinator's and the error of that, in seconds, as measured at about `now_ns` of
    this one: since a fact of some time ago the two may have drifted apart.
    """
    message = nodes_pb2.Fact(fence=fact.fence, boottime_ns=fact.boottime_ns)
    if boot_offset is not None and fact.boottime_ns:
        offset_ns, error_ns = (round(seconds * 1e9) for seconds in boot_offset)
        error_ns += round(max(0, now_ns - fact.boottime_ns) * DRIFT)
        message.moment.earliest_ns = fact.boottime_ns - offset_ns - error_ns
        message.moment.latest_ns = fact.boottime_ns - offset_ns + error_ns
    if fact.rank is not None:
        message.rank = fact.rank
    try:
        json_format.ParseDict({fact.kind: dict(fact.body)}, message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise ValueError(f"fact {fact.kind} of fence {fact.fence}, rank {fact.rank}: {error}") from error
    return message


def fact_key(message: nodes_pb2.FactKey) -> FactKey:
    """Return the key that an acknowledgement names."""
    rank = message.rank if message.HasField("rank") else None
    return message.fence, rank, _FACT_NAMES.get(message.kind, "")


def rank_progress(fence: int, rank: int, body: Mapping[str, Any], silent_s: float) -> nodes_pb2.RankProgress:
    """Return where a rank is. Anything that is no number counts as absent: a worker said it."""
    message = nodes_pb2.RankProgress(fence=fence, rank=rank, position=_position(body, silent_s))
    if body:
        message.progress.CopyFrom(_progress(body))
    return message


def _progress(body: Mapping[str, Any]) -> jobs_pb2.Progress:
    progress = jobs_pb2.Progress()
    for name in ("step", "steps"):
        value = body.get(name)
        if isinstance(value, int) and 0 <= value < 1 << 63:
            setattr(progress, name, value)
    for name in _FLOATS:
        value = body.get(name)
        if isinstance(value, int | float) and (math.isfinite(value) or name == "loss"):
            setattr(progress, name, float(value))
    return progress


def _position(body: Mapping[str, Any], silent_s: float) -> nodes_pb2.Position:
    waiting_on = body.get("waiting_on")
    ranks = waiting_on if isinstance(waiting_on, list) else []
    return nodes_pb2.Position(
        step=int(_number(body, "step")),
        section=str(body.get("section", ""))[:64],
        action=str(body.get("action", ""))[:64],
        waiting_on=[rank for rank in ranks if isinstance(rank, int) and 0 <= rank < 1 << 31],
        waiting_on_all=waiting_on == "all",
        age_s=_number(body, "age_s"),
        longest_step_s=_number(body, "longest_step_s"),
        silent_s=silent_s,
    )


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body.get(name)
    return value if isinstance(value, int | float) and 0 <= value < 1 << 62 else 0


def edge_message(edge: Edge) -> nodes_pb2.Edge:
    """Return `edge` as a message."""
    return nodes_pb2.Edge(peer_node_id=edge.peer_id, rtt_s=edge.rtt_s, bytes_per_s=edge.bytes_per_s)


def slot_message(slot: Slot) -> cluster_pb2.Slot:
    """Return `slot` as a message."""
    return cluster_pb2.Slot(index=slot.index, device=slot.device, uuid=slot.uuid)


def observed_attempt(seen: Observed) -> nodes_pb2.ObservedAttempt:
    """Return one attempt of the snapshot that opens a session."""
    is_alive = seen.shim in (Shim.STARTING, Shim.CONNECTED)
    return nodes_pb2.ObservedAttempt(
        fence=seen.fence, job_id=seen.job_id, shim_alive=is_alive, started_ranks=sorted(seen.started)
    )
