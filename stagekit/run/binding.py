"""Binding: each action of a rank's frozen list becomes one small function that knows everything but the step.

What can be known before a step is worked out once: which receives an action waits for, where a value goes in the call,
tags, peers, which sends it reaps. Decides no order (stagekit.plan does) and makes no error of what a stage raised (the
executor does). Called by stagekit.run.executor.

Note [Calls]: a Python call costs 0.1-0.3 µs, under load more, and a tiny stage has little else to do. The bound
functions therefore build tuples with `+=`, forget with `= ()` and write out the wait for a transfer.
tests/integration/run/test_calls.py holds the count.
"""

from __future__ import annotations

from collections.abc import Callable

from stagekit.plan.actions import Op
from stagekit.run.compute import bind_backward, bind_forward, bind_weights, completes
from stagekit.run.drained import drained_backward, drained_forward, drained_weights
from stagekit.run.flight import Wiring
from stagekit.run.transfers import bind_receive, bind_send


def bind(wiring: Wiring, index: int) -> Callable[[], None]:
    """Return the function of action number `index`."""
    action = wiring.recorder.actions[index]
    stage, chunk, peer = action.stage, action.chunk, action.peer
    match action.op:
        case Op.F:
            return _entered(wiring, index, bind_forward(wiring, index, stage, chunk))
        case Op.B | Op.I:
            return bind_backward(wiring, index, action.op, stage, chunk)
        case Op.W:
            return bind_weights(wiring, index, stage, chunk)
        case Op.REDUCE:
            return lambda: wiring.reductions.finish(stage)
        case Op.TIE_SUM:
            return lambda: wiring.reductions.tie_sum(chunk)
    assert peer is not None
    match action.op:
        case Op.SEND_F | Op.SEND_B:
            return bind_send(wiring, index, action.op, stage, chunk, peer)
        case Op.RECV_F | Op.RECV_B:
            return bind_receive(wiring, index, action.op, stage, chunk, peer)
        case Op.SEND_X:
            return lambda: wiring.inputs.send(peer)
        case _:
            return lambda: wiring.inputs.receive(peer, stage)


def bind_drained(wiring: Wiring, index: int) -> Callable[[], None] | None:
    """Return what runs for action number `index` of a step that failed; None: its own function, which computes nothing."""
    action = wiring.recorder.actions[index]
    stage, chunk = action.stage, action.chunk
    match action.op:
        case Op.F:
            return _entered(wiring, index, drained_forward(wiring, index, stage, chunk))
        case Op.B | Op.I:
            is_last = completes(wiring, index)
            return drained_backward(wiring, index, action.op, stage, chunk, is_last=is_last)
        case Op.W:
            return drained_weights(wiring, stage, chunk, is_last=completes(wiring, index))
        case Op.REDUCE:
            return lambda: wiring.reductions.finish(stage, is_drained=True)
        case Op.TIE_SUM:
            return lambda: wiring.reductions.tie_sum(chunk, is_drained=True)
    return None


def _entered(wiring: Wiring, index: int, forward: Callable[[], None]) -> Callable[[], None]:
    """Return `forward`; if it is its stage's first of a step that trains, after what replicas exchange before it."""
    actions = wiring.recorder.actions
    stage = actions[index].stage
    enter = wiring.reductions.entering(stage)
    of_stage = [(each.op, i) for i, each in enumerate(actions) if each.stage == stage]
    trains = any(op in (Op.B, Op.I) for op, _ in of_stage)
    if enter is None or not trains or index != min(i for op, i in of_stage if op is Op.F):
        return forward

    def first() -> None:
        enter()
        forward()

    return first
