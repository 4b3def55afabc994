"""One stage at run time: forward and backward of a chunk, with everything autograd needs in between.

Knows its module and the stage contract; knows no rank, transfer or schedule. Called by the executor only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from stagekit.plan.contract import Edge, StageSpec, ValueRef


class StageModule(Protocol):
    """What the stage contract says of a stage's module (made by stagekit.graph, or by hand)."""

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]: ...

    def set_seed_base(self, base: int) -> None: ...


@dataclass(slots=True)
class SavedChunk:
    """What a chunk keeps between its forward and its backward."""

    leaves: list[tuple[str, Tensor]]  # received values that need a gradient
    outputs: dict[str, Tensor]  # with their graph, or without when recomputing
    inputs: tuple[Any, ...] | None  # kept for recomputation only
    seed_base: int


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Accumulate gradients into the leaves of `roots`. The engine's own entry costs half of autograd.backward's."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        torch.autograd.backward(list(roots), list(gradients))
        return
    engine.run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


class StageRunner:
    """A stage's module and its chunks in flight. One thread; not reentrant."""

    def __init__(self, spec: StageSpec, module: nn.Module, edges: Mapping[str, Edge], *, recompute: bool) -> None:
        self.spec, self.module = spec, module
        self._call = cast(StageModule, module)
        self._needs_gradient = tuple(
            isinstance(ref, ValueRef) and edges[ref.value].tensor.requires_grad for ref in spec.inputs
        )
        self._values = tuple(ref.value if isinstance(ref, ValueRef) else "" for ref in spec.inputs)
        self._recompute = recompute
        self._saved: dict[int, SavedChunk] = {}
        self.peak_chunks = 0

    @property
    def num_chunks_held(self) -> int:
        """Chunks between their forward and their backward."""
        return len(self._saved)

    def forward(self, chunk: int, inputs: Sequence[Any], seed_base: int, *, train: bool) -> dict[str, Tensor]:
        """Run the module on `inputs` (flat, in the order of the spec); return its outputs by value name."""
        leaves: list[tuple[str, Tensor]] = []
        arguments = list(inputs)
        if train:
            for index, needed in enumerate(self._needs_gradient):
                if needed:
                    leaf = arguments[index].detach().requires_grad_()
                    leaves.append((self._values[index], leaf))
                    arguments[index] = leaf
        self._call.set_seed_base(seed_base)
        with torch.set_grad_enabled(train and not self._recompute):
            results = self._call(*arguments)
        outputs = dict(zip(self.spec.outputs, results, strict=True))
        if train:
            kept = tuple(arguments) if self._recompute else None
            self._saved[chunk] = SavedChunk(leaves, {} if self._recompute else outputs, kept, seed_base)
            self.peak_chunks = max(self.peak_chunks, len(self._saved))
        return outputs

    def backward(self, chunk: int, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Accumulate parameter gradients; return the gradient of each received value (None: zero).

        `gradients` are those of the outputs by value name; None or absent means zero.
        """
        saved = self._saved.pop(chunk)
        outputs = self._recomputed(saved) if saved.inputs is not None else saved.outputs
        roots, seeds = [], []
        for value, gradient in gradients.items():
            output = outputs[value]
            if gradient is not None and output.requires_grad:
                roots.append(output)
                seeds.append(gradient)
        if roots:
            run_backward(roots, seeds)
        return {value: leaf.grad for value, leaf in saved.leaves}

    def backward_from(self, chunk: int, root: Tensor, gradient: Tensor | None) -> dict[str, Tensor | None]:
        """Like `backward`, from the loss; None: this chunk weighs nothing."""
        saved = self._saved.pop(chunk)
        if gradient is not None and root.requires_grad:
            run_backward((root,), (gradient,))
        return {value: leaf.grad for value, leaf in saved.leaves}

    def drop_all(self) -> None:
        """Forget every chunk in flight, after a failed step."""
        self._saved.clear()

    def _recomputed(self, saved: SavedChunk) -> dict[str, Tensor]:
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        self._call.set_seed_base(saved.seed_base)
        with torch.enable_grad():
            results = self._call(*cast(tuple[Any, ...], saved.inputs))
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return dict(zip(self.spec.outputs, results, strict=True))
