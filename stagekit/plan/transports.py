"""Transports: what has to happen before a message arrives, and which messages queue behind each other.

The verifier and the simulator ask here, so that both mean the same. A send costs its rank nothing and a receive only
posts; whoever needs the data waits. Note [Arrival]: a message arrives `hop` after

* implicit: its data was made; transfers in the lists do not count (the published bubble rates assume this);
* eager: it was sent;
* rendezvous: it was sent and its receive is posted (gloo with tags, what stagekit.run uses);
* directed: the same, and the message before it from this rank to that one has arrived (a NCCL communicator per direction);
* ordered: the same with one queue for both directions of a pair of ranks (one NCCL communicator).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from stagekit.plan.actions import Op


class Transport(StrEnum):
    """How a message travels; see Note [Arrival]."""

    IMPLICIT = "implicit"
    EAGER = "eager"
    RENDEZVOUS = "rendezvous"
    ORDERED = "ordered"
    DIRECTED = "directed"


class Channel(NamedTuple):
    """Messages of one kind ("F", "B" or "X") from one rank to another: their order is equal at both ends."""

    source_rank: int
    target_rank: int
    kind: str


class Message(NamedTuple):
    """One transfer between two stages: activations of (source, chunk) to `target`, or gradients the other way."""

    kind: str
    source: int
    target: int
    chunk: int


def message_of(op: Op, stage: int, chunk: int, peer: int) -> Message:
    """Return the message that a SEND or a RECV of `stage` is one end of."""
    kind, is_send = _ENDS[op]
    return Message(kind, stage, peer, chunk) if is_send else Message(kind, peer, stage, chunk)


_ENDS = {
    Op.SEND_F: ("F", True),
    Op.RECV_F: ("F", False),
    Op.SEND_B: ("B", True),
    Op.RECV_B: ("B", False),
    Op.SEND_X: ("X", True),
    Op.RECV_X: ("X", False),
}


def wire(transport: Transport, channel: Channel) -> tuple[object, ...] | None:
    """Return what `channel` shares its queue with: equal for channels of one queue, None where nothing queues."""
    source, target, _ = channel
    if transport is Transport.DIRECTED:
        return (source, target)
    if transport is Transport.ORDERED:
        return (min(source, target), max(source, target))
    return None
