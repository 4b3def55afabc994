"""Actions of a step that failed: they move what others wait for and compute nothing.

A rank that goes on through its list so keeps its neighbours from waiting: receives are waited for, sends carry zeros,
collectives are joined. Each function returns what runs instead of an action's own function; None: its own does.
Called by stagekit.run.binding only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stagekit.plan.actions import Op
from stagekit.run.flight import Wiring
from stagekit.run.transport import on_wire, settle

Call = Callable[[], None]


def drained_forward(wiring: Wiring, index: int, stage: int, chunk: int) -> Call:
    """Return F without its compute: zeros take the place of what it sends."""
    flight, placement = wiring.flight, wiring.placement
    outputs = wiring.runners[stage].spec.outputs
    sent = {
        edge.value
        for _, peer in wiring.transfers(Op.SEND_F, stage, chunk)
        for edge in placement.edges_between(stage, peer)
    }

    def forward() -> None:
        _wait(wiring, wiring.transfers(Op.RECV_F, stage, chunk))
        wiring.runners[stage].join_forward(chunk)
        made: tuple[torch.Tensor, ...] = ()
        for value in outputs:
            layout = flight.shapes[chunk].edges[value] if value in sent else ((0,), (1,), torch.float32)
            made += (_zeros(layout, wiring.inputs.device),)
        flight.made[index] = made
        if stage == placement.last_stage and wiring.loss is not None:
            wiring.loss.abandon()
        if wiring.gradient_maker(stage, chunk) is None:
            _release(wiring, stage, chunk)

    return forward


def drained_backward(wiring: Wiring, index: int, op: Op, stage: int, chunk: int, *, is_last: bool) -> Call:
    """Return B or I without its compute; every gradient that it sends is zero."""
    flight = wiring.flight

    def backward() -> None:
        _wait(wiring, wiring.transfers(Op.RECV_B, stage, chunk))
        for send, peer in wiring.transfers(Op.SEND_F, stage, chunk):
            if wiring.comes_back(wiring.recorder.actions[send]):
                for work, _ in flight.sent[send]:
                    settle(work, wiring.placement.stage_ranks[peer])
                flight.sent[send] = ()
        wiring.runners[stage].join_backward(chunk)
        flight.made[index] = [None] * len(wiring.runners[stage].spec.inputs)
        if is_last:
            wiring.reductions.abandon(stage)
        if op is Op.B:
            _release(wiring, stage, chunk)

    return backward


def drained_weights(wiring: Wiring, stage: int, chunk: int, *, is_last: bool) -> Call:
    """Return W without its compute."""

    def weights() -> None:
        if is_last:
            wiring.reductions.abandon(stage)
        _release(wiring, stage, chunk)

    return weights


def send_zeros(wiring: Wiring, index: int) -> None:
    """Post SEND_F or SEND_B without waiting for anything: its credits, or what made the values."""
    action, placement, flight = wiring.recorder.actions[index], wiring.placement, wiring.flight
    assert action.peer is not None
    gradients, peer = action.op is Op.SEND_B, placement.stage_ranks[action.peer]
    source, target = (action.peer, action.stage) if gradients else (action.stage, action.peer)
    for number, edge in enumerate(placement.edges_between(source, target, gradients=gradients)):
        layout = flight.shapes[action.chunk].edges[edge.value]
        wire = on_wire(_zeros(layout, wiring.inputs.device), layout[1])
        tag = placement.tag(source, target, action.chunk, number, gradients=gradients)
        work = wiring.transport.send([wire], peer, tag)
        if work is not None:
            flight.sent[index] += ((work, wire),)


def _wait(wiring: Wiring, receives: Sequence[tuple[int, int]]) -> None:
    for index, peer in receives:
        for work, _ in wiring.flight.received[index]:
            settle(work, wiring.placement.stage_ranks[peer])


def _release(wiring: Wiring, stage: int, chunk: int) -> None:
    for receive in wiring.held(stage, chunk):
        for _, buffer in wiring.flight.received[receive]:
            wiring.pool.give(buffer)
        wiring.flight.received[receive] = ()


def _zeros(layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype], device: torch.device) -> torch.Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
