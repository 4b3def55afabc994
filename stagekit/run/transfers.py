"""Sends and receives between stages as bound functions: post only; whoever needs the data, or the credit, waits.

Each function of this module looks things up once and returns what runs per step, see Note [Calls] in
stagekit.run.binding, the only caller.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stagekit.plan.actions import Op
from stagekit.plan.contract import ValueRef
from stagekit.plan.verify import SEND_CREDITS
from stagekit.run.flight import Received, Wiring
from stagekit.run.transport import lost, on_wire


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
    take, recv = wiring.pool.take, wiring.transport.recv

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


def bind_send_forward(wiring: Wiring, index: int, stage: int, chunk: int, peer: int) -> Callable[[], None]:
    """Return SEND_F: the outputs that stage `peer` reads."""
    placement, flight, outputs = wiring.placement, wiring.flight, wiring.runners[stage].spec.outputs
    values = [
        (outputs.index(edge.value), edge.value, placement.tag(stage, peer, chunk, number, gradients=False))
        for number, edge in enumerate(placement.edges_between(stage, peer))
    ]
    maker = wiring.find(Op.F, stage, chunk)
    assert maker is not None
    frees = index == max(i for i, _ in wiring.transfers(Op.SEND_F, stage, chunk))
    post = _bind_post(wiring, index, chunk, "send_forward")

    def send() -> None:
        made = flight.made[maker]
        for position, value, tag in values:
            post(made[position], value, tag)
        if frees:
            flight.made[maker] = ()

    return send


def bind_send_backward(wiring: Wiring, index: int, stage: int, chunk: int, peer: int) -> Callable[[], None]:
    """Return SEND_B: the gradients of what stage `peer` made."""
    placement, flight, refs = wiring.placement, wiring.flight, wiring.runners[stage].spec.inputs
    values = [
        (refs.index(ValueRef(edge.value)), edge.value, placement.tag(peer, stage, chunk, number, gradients=True))
        for number, edge in enumerate(placement.edges_between(peer, stage, gradients=True))
    ]
    maker = wiring.gradient_maker(stage, chunk)
    assert maker is not None
    frees = index == max(i for i, _ in wiring.transfers(Op.SEND_B, stage, chunk))
    post, device = _bind_post(wiring, index, chunk, "send_backward"), wiring.inputs.device

    def send() -> None:
        returned = flight.returned[maker]
        for position, value, tag in values:
            gradient = returned[position]
            if gradient is None:
                shape, _, dtype = flight.shapes[chunk].edges[value]
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            post(gradient, value, tag)
        if frees:
            flight.returned[maker] = ()

    return send


def _bind_post(wiring: Wiring, index: int, chunk: int, direction: str) -> Callable[[Tensor, str, int], None]:
    """Return what sends one value and, once the channel's credits are used up, waits for its oldest send."""
    action, flight, counted = wiring.recorder.actions[index], wiring.flight, wiring.bytes
    assert action.peer is not None
    counter = (action.stage, direction)
    peer_rank, send = wiring.placement.stage_ranks[action.peer], wiring.transport.send
    flight.peers[index] = peer_rank
    oldest = _oldest_unsettled(wiring, index)

    def post(tensor: Tensor, value: str, tag: int) -> None:
        shapes, wire = flight.shapes[chunk], tensor
        if value not in shapes.contiguous or not tensor.is_contiguous():
            wire = on_wire(tensor, shapes.edges[value][1])
        try:
            flight.sent[index] += ((send([wire], peer_rank, tag), wire),)
            counted[counter] += wire.nbytes
            if oldest is not None:
                for work, _ in flight.sent[oldest]:
                    work.wait()
                flight.sent[oldest] = ()
        except RuntimeError as error:
            raise lost(peer_rank, error) from error

    return post


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
