"""Sends and receives between stages as bound functions: post only; whoever needs the data, or the credit, waits.

Each function of this module looks things up once and returns what runs per step, see Note [Calls] in
stagekit.run.binding, the only caller.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stagekit.plan.actions import Op
from stagekit.plan.contract import ValueRef
from stagekit.plan.verify import SEND_CREDITS
from stagekit.run.flight import Received, Wiring
from stagekit.run.transport import lost, on_wire, towards


def bind_receive(wiring: Wiring, index: int, op: Op, stage: int, chunk: int, peer: int) -> Callable[[], None]:
    """Return RECV_F or RECV_B: a buffer out of the pool for every value, and its receive."""
    gradients = op is Op.RECV_B
    source, target = (stage, peer) if gradients else (peer, stage)
    placement, flight, counted = wiring.placement, wiring.flight, wiring.bytes
    values = [
        (edge.value, placement.tag(source, target, chunk, number, gradients=gradients))
        for number, edge in enumerate(placement.edges_between(source, target, gradients=gradients))
    ]
    counter = (stage, "recv_backward" if gradients else "recv_forward")
    peer_rank = placement.stage_ranks[peer]
    take, recv = wiring.pool.take, towards(wiring.transport, peer_rank).recv

    def receive() -> None:
        layouts = flight.shapes[chunk].edges
        posted: Received = ()
        for value, tag in values:
            buffer = take(layouts[value])
            try:
                posted += ((recv([buffer.wire], peer_rank, tag), buffer),)
            except RuntimeError as error:
                raise lost(peer_rank, error) from error
            counted[counter] += buffer.size_bytes
        flight.received[index] = posted

    return receive


def bind_send(wiring: Wiring, index: int, op: Op, stage: int, chunk: int, peer: int) -> Callable[[], None]:
    """Return SEND_F, the outputs that stage `peer` reads, or SEND_B, the gradients of what it made.

    Once a channel's credits are used up, it waits for the channel's oldest send.
    """
    placement, flight, counted, spec = wiring.placement, wiring.flight, wiring.bytes, wiring.runners[stage].spec
    is_back = op is Op.SEND_B
    source, target = (peer, stage) if is_back else (stage, peer)
    names = [ref.value if isinstance(ref, ValueRef) else None for ref in spec.inputs] if is_back else spec.outputs
    values = [
        (names.index(edge.value), edge.value, placement.tag(source, target, chunk, number, gradients=is_back))
        for number, edge in enumerate(placement.edges_between(source, target, gradients=is_back))
    ]
    maker = wiring.gradient_maker(stage, chunk) if is_back else wiring.find(Op.F, stage, chunk)
    assert maker is not None
    frees = index == max(i for i, _ in wiring.transfers(op, stage, chunk))
    counter = (stage, "send_backward" if is_back else "send_forward")
    peer_rank, device = placement.stage_ranks[peer], wiring.inputs.device
    post = towards(wiring.transport, peer_rank).send
    flight.peers[index] = peer_rank
    oldest = _oldest_unsettled(wiring, index)

    def send() -> None:
        made, shapes = flight.made[maker], flight.shapes[chunk]
        for position, value, tag in values:
            wire = made[position]
            if wire is None:
                shape, _, dtype = shapes.edges[value]
                wire = torch.zeros(shape, dtype=dtype, device=device)
            if value not in shapes.contiguous or not wire.is_contiguous():
                wire = on_wire(wire, shapes.edges[value][1])
            try:
                work = post([wire], peer_rank, tag)
                if work is not None:
                    flight.sent[index] += ((work, wire),)
                counted[counter] += wire.nbytes
                if oldest is not None:
                    for work, _ in flight.sent[oldest]:
                        work.wait()
                    flight.sent[oldest] = ()
            except RuntimeError as error:
                raise lost(peer_rank, error) from error
        if frees:
            flight.made[maker] = ()

    return send


def _oldest_unsettled(wiring: Wiring, index: int) -> int | None:
    """Return the send of the same stage to the same rank that send `index` waits for; None while credits last.

    Sends whose gradient comes back are reaped by their backward and use no credit.
    """
    this = wiring.recorder.actions[index]
    assert this.peer is not None
    if this.op is Op.SEND_F and wiring.comes_back(this):
        return None
    channel = wiring.credits.setdefault((this.stage, wiring.placement.stage_ranks[this.peer]), [])
    channel.append(index)  # actions are bound in the order of the list
    return channel[-1 - SEND_CREDITS] if len(channel) > SEND_CREDITS else None
