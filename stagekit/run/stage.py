"""One stage at run time: forward and backward of a chunk, with everything autograd needs in between.

Knows its module and the stage contract; knows no rank, transfer or schedule. Values are told apart by their position
in the spec, since names would cost a lookup per chunk. The caller sets the grad mode for a whole step: on for training.
Called by the executor only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from stagekit.plan.contract import Edge, InputRef, StageSpec, ValueRef


class StageModule(Protocol):
    """What the stage contract says of a stage's module (made by stagekit.graph, or by hand)."""

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]: ...

    def set_seed_base(self, base: int) -> None: ...


class Deferred(Protocol):
    """A weight of one chunk whose gradient can wait."""

    edge: Any  # torch.autograd.graph.GradientEdge: a backward must name it as wanted
    parameter: nn.Parameter

    def accumulate(self) -> None:
        """Add the gradient to the parameter's, once a backward through `edge` is over."""
        ...


@runtime_checkable
class DefersWeights(Protocol):
    """A stage's module that can tell input and weight gradients apart; any other computes both at once."""

    def defer_weights(self) -> None: ...

    def take_deferred(self) -> list[Deferred]: ...


# What a chunk keeps between its forward and its backward: the arguments (received values as leaves), the outputs
# (with their graph; none when recomputing), the seed base, when recomputing the written states as its forward found
# them, the weights whose gradient can wait, and where the stage's graph ends if any can. A tuple: a class costs a call
# per chunk.
SavedChunk = tuple[list[Any], tuple[Tensor, ...] | None, int, tuple[Tensor, ...], Sequence[Deferred], tuple[Any, ...]]

_ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)


def run_backward(roots: tuple[Tensor, ...], gradients: tuple[Tensor, ...], wanted: tuple[Any, ...] = ()) -> None:
    """Accumulate gradients into the leaves of `roots`, or into those of `wanted` (leaves, and edges to go through).

    The engine's own entry costs half of autograd.backward's.
    """
    if _ENGINE is None:
        torch.autograd.backward(roots, gradients, inputs=wanted or None)
    else:
        _ENGINE.run_backward(roots, gradients, False, False, wanted, allow_unreachable=True, accumulate_grad=True)


def _leaves_of(root: Tensor, ends: Collection[Any] = ()) -> tuple[Tensor, ...]:
    """Return the leaves that a backward from `root` reaches, not going through the nodes `ends`.

    Few calls for a graph of few nodes, see Note [Calls] in stagekit.run.binding.
    """
    if root.grad_fn is None:
        return (root,)
    leaves: tuple[Tensor, ...] = ()
    seen: set[Any] = {None, *ends}
    if root.grad_fn in seen:
        return leaves
    todo: list[Any] = [root.grad_fn]
    for node in todo:  # which grows meanwhile
        for following, _ in node.next_functions:
            if following in seen:
                continue
            seen.add(following)
            if following.next_functions:
                todo += (following,)
            elif isinstance(leaf := getattr(following, "variable", None), Tensor):
                leaves += (leaf,)
    return leaves


def written_states(module: nn.Module) -> list[Tensor]:
    """Return what a forward of `module` writes beside its outputs; every buffer, if the module does not say."""
    ask = getattr(module, "written_states", None)
    return list(module.buffers()) if ask is None else ask()


def reread_states(module: nn.Module) -> list[Tensor]:
    """Return those of `written_states` whose values a forward computes with."""
    ask = getattr(module, "reread_states", None)
    return list(module.buffers()) if ask is None else ask()


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the states that the module's forward writes have their values back afterwards."""
    states = [(state, state.detach().clone()) for state in written_states(module)]
    try:
        yield
    finally:
        with torch.no_grad():
            for state, value in states:
                state.copy_(value)


class StageRunner:
    """A stage's module and its chunks in flight. One thread; not reentrant."""

    def __init__(
        self,
        spec: StageSpec,
        module: nn.Module,
        edges: Mapping[str, Edge],
        *,
        recompute: bool,
        defer_weights: bool = False,
        call: nn.Module | None = None,
    ) -> None:
        """`defer_weights`: backwards come in two halves, `input_gradient` and `weight_gradient`. `call`: what runs in
        place of the module, a wrapper of it.
        """
        self.spec, self.module = spec, module
        self._call = cast(Callable[..., tuple[Tensor, ...]], call or module)
        self._set_seed_base = cast(StageModule, module).set_seed_base
        self.draws: bool = getattr(module, "draws", True)  # whether its forward needs a seed base
        self._leaf_positions = tuple(
            position
            for position, ref in enumerate(spec.inputs)
            if isinstance(ref, ValueRef) and edges[ref.value].tensor.requires_grad
        )
        self._input_positions = tuple(p for p, ref in enumerate(spec.inputs) if isinstance(ref, InputRef))
        self._recompute = recompute
        self._saved: dict[int, SavedChunk] = {}
        self._waiting: dict[int, Sequence[Deferred]] = {}  # by chunk, between the two halves of its backward
        self._take_deferred: Callable[[], Sequence[Deferred]] | None = None  # None: nothing of a backward waits
        if defer_weights and self._leaf_positions and isinstance(module, DefersWeights):
            module.defer_weights()
            self._take_deferred = module.take_deferred
        self._parameters = tuple((id(p), p) for p in module.parameters())
        self.num_chunks_held = self.peak_chunks = 0  # chunks between their forward and their backward

    def forward(self, chunk: int, arguments: list[Any], seed_base: int, train: bool) -> tuple[Tensor, ...]:
        """Run the module on `arguments` (in the order of the spec, kept); return its outputs in the spec's order."""
        if train:
            for position in self._leaf_positions:
                arguments[position] = arguments[position].detach().requires_grad_()
        if self.draws:
            self._set_seed_base(seed_base)
        if not train:
            return self._call(*arguments)
        if self._recompute:
            found = tuple(state.detach().clone() for state in reread_states(self.module))
            with torch.no_grad():
                outputs = self._call(*arguments)
            self._saved[chunk] = (arguments, None, seed_base, found, (), ())
        else:
            outputs = self._call(*arguments)
            deferred: Sequence[Deferred] = ()
            ends: tuple[Any, ...] = ()
            if self._take_deferred is not None:
                deferred = self._take_deferred()
                for output in outputs:
                    ends += (output.grad_fn,)  # now: the loss function may write into it
            self._saved[chunk] = (arguments, outputs, seed_base, (), deferred, ends)
        self.num_chunks_held += 1
        if self.num_chunks_held > self.peak_chunks:
            self.peak_chunks = self.num_chunks_held
        return outputs

    def backward(self, chunk: int, gradients: Sequence[Tensor | None]) -> list[Any]:
        """Accumulate parameter gradients; return those of the received values at their positions (None: zero).

        `gradients` are those of the outputs in the spec's order; None means zero.
        """
        arguments, outputs, seed_base, found, _, _ = self._saved[chunk]
        del self._saved[chunk]
        self.num_chunks_held -= 1
        if outputs is not None:
            self._run_backward(outputs, gradients, ())
        else:
            # until autograd is through: it may read a state that the forward wrote
            with restored(self.module):
                outputs, _ = self._recomputed(arguments, seed_base, found)
                self._run_backward(outputs, gradients, ())
        return self._gradients(arguments)

    def input_gradient(self, chunk: int, gradients: Sequence[Tensor | None]) -> list[Any]:
        """Like `backward`, but leave for `weight_gradient` what can wait."""
        arguments, outputs, seed_base, found, deferred, _ = self._saved[chunk]
        del self._saved[chunk]
        if outputs is not None:
            self._run_backward(outputs, gradients, self._wanted(arguments, deferred))
        else:
            with restored(self.module):
                outputs, deferred = self._recomputed(arguments, seed_base, found)
                self._run_backward(outputs, gradients, self._wanted(arguments, deferred))
        self._waiting[chunk] = deferred
        return self._gradients(arguments)

    def waiting(self, chunk: int) -> list[nn.Parameter]:
        """Return the parameters whose gradients `input_gradient` left."""
        return [deferred.parameter for deferred in self._waiting[chunk]]

    def weight_gradient(self, chunk: int, ready: Callable[[nn.Parameter], None] | None = None) -> None:
        """Accumulate the parameter gradients that `input_gradient` left, last layers first; call `ready` for each."""
        for deferred in reversed(self._waiting.pop(chunk)):
            deferred.accumulate()
            if ready is not None:
                ready(deferred.parameter)
        self.num_chunks_held -= 1

    def _wanted(self, arguments: Sequence[Any], deferred: Sequence[Deferred]) -> tuple[Any, ...]:
        """Return what the first half of a backward is for; nothing (all leaves) where it is the whole.

        Asked anew for every chunk: a caller may freeze a parameter, and pass an input that requires grad, at any step.
        """
        if not deferred:
            return ()
        waits = {id(each.parameter) for each in deferred}
        wanted = [arguments[position] for position in self._leaf_positions]
        wanted += [parameter for key, parameter in self._parameters if parameter.requires_grad and key not in waits]
        wanted += [each.edge for each in deferred]
        for position in self._input_positions:
            argument = arguments[position]
            if isinstance(argument, Tensor) and argument.requires_grad:
                wanted += _leaves_of(argument)
        return tuple(wanted)

    def _run_backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: tuple[Any, ...]
    ) -> None:
        roots: tuple[Tensor, ...] = ()
        seeds: tuple[Tensor, ...] = ()
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None and output.requires_grad:
                roots += (output,)
                seeds += (gradient,)
        if roots:
            run_backward(roots, seeds, wanted)

    def backward_from(self, chunk: int, root: Tensor, gradient: Tensor | None) -> list[Any]:
        """Like `backward`, from the loss; None: this chunk weighs nothing."""
        arguments = self._saved[chunk][0]
        del self._saved[chunk]
        self.num_chunks_held -= 1
        if gradient is not None and root.requires_grad:
            run_backward((root,), (gradient,))
        return self._gradients(arguments)

    def input_gradient_from(self, chunk: int, root: Tensor, gradient: Tensor | None) -> list[Any]:
        """Like `input_gradient`, from the loss; None: this chunk weighs nothing."""
        arguments, _, _, _, deferred, ends = self._saved[chunk]
        del self._saved[chunk]
        if gradient is not None and root.requires_grad:
            own = _leaves_of(root, ends) if deferred else ()  # of the loss function: parameters, another one each step
            if own:
                read = {id(leaf) for leaf in own}  # a weight of the stage that it reads does not wait
                deferred = [each for each in deferred if id(each.parameter) not in read]
            wanted = self._wanted(arguments, deferred)
            run_backward((root,), (gradient,), wanted and (*wanted, *own))
        self._waiting[chunk] = deferred
        return self._gradients(arguments)

    def _gradients(self, arguments: list[Any]) -> list[Any]:
        """Put each received value's gradient in its place; that frees the value."""
        for position in self._leaf_positions:
            arguments[position] = arguments[position].grad
        return arguments

    @property
    def halves(self) -> bool:
        """Whether `weight_gradient` has anything to do."""
        return self._take_deferred is not None

    @property
    def keeps_no_graph(self) -> bool:
        """Whether a forward is run again before its backward."""
        return self._recompute

    def join_forward(self, chunk: int) -> None:
        """In place of a forward that is not computed: exchange with replicas what it would. Nothing, in most stages."""

    def join_backward(self, chunk: int) -> None:
        """In place of a backward, or its first half, that is not computed: like `join_forward`."""

    def drop_all(self) -> None:
        """Forget every chunk in flight, after a failed step."""
        self._saved.clear()
        self._waiting.clear()
        self.num_chunks_held = 0

    def _recomputed(
        self, arguments: Sequence[Any], seed_base: int, found: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Sequence[Deferred]]:
        """Run the chunk's forward again, from the states that its first one found; return also what it deferred."""
        with torch.no_grad():
            for state, value in zip(reread_states(self.module), found, strict=True):
                state.copy_(value)
        if self.draws:
            self._set_seed_base(seed_base)
        with torch.enable_grad():
            outputs = self._call(*arguments)
        return outputs, () if self._take_deferred is None else self._take_deferred()
