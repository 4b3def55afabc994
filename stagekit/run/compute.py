"""F and B as bound functions: wait for what the action needs, run the stage, keep or hand on what it made.

Each function of this module looks things up once and returns what runs per step, see Note [Calls] in
stagekit.run.binding, the only caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

from torch import Tensor

from stagekit.plan.actions import Op
from stagekit.plan.contract import InputRef, SymbolRef, ValueRef
from stagekit.plan.seeds import chunk_base
from stagekit.run.flight import Wiring
from stagekit.run.transport import lost


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Where the arguments of one forward come from; positions are those of the call."""

    awaited: tuple[tuple[int, int, tuple[tuple[int, ...], ...]], ...]  # receive, peer rank, positions of each value
    from_here: tuple[tuple[str, tuple[int, ...]], ...]  # value of another stage of this rank, positions
    cut: tuple[tuple[int, int], ...]  # position, graph input
    sizes: tuple[tuple[int, str], ...]  # position, symbol

    @classmethod
    def of(cls, wiring: Wiring, stage: int, chunk: int) -> _Arguments:
        """Look them up."""
        placement, refs = wiring.placement, wiring.runners[stage].spec.inputs
        places: dict[str, tuple[int, ...]] = {}
        for position, ref in enumerate(refs):
            if isinstance(ref, ValueRef):
                places[ref.value] = (*places.get(ref.value, ()), position)
        awaited = [
            (i, placement.stage_ranks[peer], tuple(places[e.value] for e in placement.edges_between(peer, stage)))
            for i, peer in wiring.transfers(Op.RECV_F, stage, chunk)
        ]
        edges = [edge for edge in placement.spec.edges if stage in edge.targets and wiring.is_here(edge.source)]
        return cls(
            tuple(awaited),
            tuple((edge.value, places[edge.value]) for edge in edges),
            tuple((position, ref.index) for position, ref in enumerate(refs) if isinstance(ref, InputRef)),
            tuple((position, ref.symbol) for position, ref in enumerate(refs) if isinstance(ref, SymbolRef)),
        )


def bind_forward(wiring: Wiring, index: int, stage: int, chunk: int) -> Callable[[], None]:
    """Return F of one chunk."""
    flight, recorder, runner = wiring.flight, wiring.recorder, wiring.runners[stage]
    give, collect = wiring.pool.give, _bind_arguments(wiring, stage, chunk)
    is_last = stage == wiring.placement.last_stage
    loss = wiring.loss if is_last else None
    kept = [
        (runner.spec.outputs.index(edge.value), edge.value, target)
        for edge in wiring.placement.spec.edges
        if edge.source == stage
        for target in edge.targets
        if wiring.is_here(target)
    ]
    is_sent = bool(wiring.transfers(Op.SEND_F, stage, chunk))
    is_seeded = runner.draws or loss is not None
    released = wiring.held(stage, chunk) if wiring.gradient_maker(stage, chunk) is None else ()

    def forward() -> None:
        step = flight.step
        arguments = collect()
        if loss is not None and loss.targets is None:
            loss.prepare(step.chunk_sizes)
        begun = monotonic_ns()
        recorder.wait_ns[index] = begun - recorder.start_ns[index]
        recorder.start_ns[index] = begun
        base = chunk_base(step.seed, step.number, chunk, step.replica) if is_seeded else 0
        outputs = runner.forward(chunk, arguments, base, step.train)
        if loss is not None:
            loss.forward(chunk, outputs, base, step.train)
        if is_last and step.keep_output:
            detached: tuple[Tensor, ...] = ()
            for output in outputs:
                detached += (output.detach(),)
            step.outputs[chunk] = detached
        for position, value, target in kept:
            flight.values[value, target, chunk] = outputs[position].detach()
        if is_sent:
            flight.made[index] = outputs
        for receive in released:
            for _, buffer in flight.received[receive]:
                give(buffer)
            flight.received[receive] = ()

    return forward


def _bind_arguments(wiring: Wiring, stage: int, chunk: int) -> Callable[[], list[Any]]:
    """Return what waits for the arguments of a forward, and puts them in the order of the call."""
    flight, inputs = wiring.flight, wiring.inputs
    sources = _Arguments.of(wiring, stage, chunk)
    awaited, from_here, cut, sizes = sources.awaited, sources.from_here, sources.cut, sources.sizes
    blank = [None] * len(wiring.runners[stage].spec.inputs)

    def collect() -> list[Any]:
        arguments: list[Any] = blank[:]
        for receive, peer, positions in awaited:
            for (work, buffer), here in zip(flight.received[receive], positions, strict=True):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise lost(peer, error) from error
                for position in here:
                    arguments[position] = buffer.tensor
        for position, number in cut:
            arguments[position] = (inputs.parts[number] or inputs.cut(number, flight.step.chunk_sizes))[chunk]
        for position, symbol in sizes:
            arguments[position] = flight.shapes[chunk].symbols[symbol]
        for value, here in from_here:
            tensor = flight.values.pop((value, stage, chunk))
            for position in here:
                arguments[position] = tensor
        return arguments

    return collect


def bind_backward(wiring: Wiring, index: int, op: Op, stage: int, chunk: int) -> Callable[[], None]:
    """Return B of one chunk, or I: then W ends what both need and reduces."""
    flight, recorder, runner = wiring.flight, wiring.recorder, wiring.runners[stage]
    reductions, give = wiring.reductions, wiring.pool.give
    loss = wiring.loss if stage == wiring.placement.last_stage else None
    collect, deliver = _bind_gradients(wiring, stage, chunk), _bind_deliver(wiring, stage, chunk)
    is_whole = op is Op.B
    arms = completes(wiring, index)
    from_loss, from_gradients = (
        (runner.backward_from, runner.backward) if is_whole else (runner.input_gradient_from, runner.input_gradient)
    )
    held = wiring.held(stage, chunk) if is_whole else ()
    is_sent = bool(wiring.transfers(Op.SEND_B, stage, chunk))

    def backward() -> None:
        if collect is not None:
            gradients = collect()
        if arms:
            reductions.arm(stage)
        begun = monotonic_ns()
        recorder.wait_ns[index] = begun - recorder.start_ns[index]
        recorder.start_ns[index] = begun
        if loss is not None:
            returned = from_loss(chunk, *loss.take(chunk))
        else:
            returned = from_gradients(chunk, gradients)
            del gradients
        if arms:
            reductions.launch_rest(stage)
        if is_sent:
            flight.made[index] = returned
        if deliver is not None:
            deliver(returned)
        for receive in held:
            for _, buffer in flight.received[receive]:
                give(buffer)
            flight.received[receive] = ()

    return backward


def bind_weights(wiring: Wiring, index: int, stage: int, chunk: int) -> Callable[[], None]:
    """Return W of one chunk: the weight gradients that its I left."""
    flight, reductions, give = wiring.flight, wiring.reductions, wiring.pool.give
    runner = wiring.runners[stage]
    compute, waiting = runner.weight_gradient, runner.waiting
    arms, held = completes(wiring, index), wiring.held(stage, chunk)

    def weights() -> None:
        if arms:
            compute(chunk, reductions.arm_for(stage, waiting(chunk)))
            reductions.launch_rest(stage)
        else:
            compute(chunk)
        for receive in held:
            for _, buffer in flight.received[receive]:
                give(buffer)
            flight.received[receive] = ()

    return weights


def completes(wiring: Wiring, index: int) -> bool:
    """Say whether the gradients of the action's stage are complete once it ran: at its last B, or the last half that
    makes any.
    """
    actions = wiring.recorder.actions
    stage = actions[index].stage
    half = Op.W if wiring.runners[stage].halves else Op.I
    return index == max((i for i, a in enumerate(actions) if a.stage == stage and a.op in (Op.B, half)), default=-1)


def _bind_gradients(wiring: Wiring, stage: int, chunk: int) -> Callable[[], list[Tensor | None]] | None:
    """Return what sums each output's gradient over the stages that read it, in their order; None for the loss's stage.

    Those of this rank's own stages come first. A gradient's arrival also reaps the send that it answers.
    """
    if stage == wiring.placement.last_stage and wiring.loss is not None:
        return None
    flight, placement, outputs = wiring.flight, wiring.placement, wiring.runners[stage].spec.outputs
    awaited, reaped = [], []
    for i, peer in wiring.transfers(Op.RECV_B, stage, chunk):
        edges = placement.edges_between(stage, peer, gradients=True)
        awaited.append((i, placement.stage_ranks[peer], tuple(outputs.index(edge.value) for edge in edges)))
    for i, peer in wiring.transfers(Op.SEND_F, stage, chunk):
        if wiring.comes_back(wiring.recorder.actions[i]):
            reaped.append((i, placement.stage_ranks[peer]))
    targets = {target for edge in placement.spec.edges if edge.source == stage for target in edge.targets}
    has_readers_here = any(wiring.is_here(target) for target in targets)
    blank: list[Tensor | None] = [None] * len(outputs)

    def collect() -> list[Tensor | None]:
        gradients = flight.gradients.pop((stage, chunk), blank[:]) if has_readers_here else blank[:]
        for receive, peer, positions in awaited:
            for (work, buffer), position in zip(flight.received[receive], positions, strict=True):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise lost(peer, error) from error
                seen = gradients[position]
                gradients[position] = buffer.tensor if seen is None else seen + buffer.tensor
        for send, peer in reaped:
            for sent, _ in flight.sent[send]:
                try:
                    sent.wait()
                except RuntimeError as error:
                    raise lost(peer, error) from error
            flight.sent[send] = ()
        return gradients

    return collect


def _bind_deliver(wiring: Wiring, stage: int, chunk: int) -> Callable[[list[Any]], None] | None:
    """Return what hands gradients to those makers that are on this rank; None: there are none."""
    refs, flight = wiring.runners[stage].spec.inputs, wiring.flight
    makers = []
    for source in filter(wiring.is_here, range(stage)):
        outputs = wiring.runners[source].spec.outputs
        for edge in wiring.placement.edges_between(source, stage, gradients=True):
            makers.append((source, len(outputs), outputs.index(edge.value), refs.index(ValueRef(edge.value))))
    if not makers:
        return None

    def deliver(returned: list[Any]) -> None:
        for source, count, position, place in makers:
            inbox = flight.gradients.setdefault((source, chunk), [None] * count)
            gradient, seen = returned[place], inbox[position]
            if gradient is not None:
                inbox[position] = gradient if seen is None else seen + gradient

    return deliver
