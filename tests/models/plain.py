"""The unsplit model, chunk by chunk, with the seeds that stages use: what every cut is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagekit.graph.compile.randomness import mix
from stagekit.testing import LocalResult

_RECURRENT = tuple(getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))


class Counter:
    """Numbers the random operations of one forward as the capture does."""

    def __init__(self, base: int) -> None:
        self.base, self.number, self.inside = base, 0, False

    def seed(self) -> None:
        torch.default_generator.manual_seed(mix(self.base, self.number))
        self.number += 1


class ReseedEach(TorchDispatchMode):
    """Before the n-th random operation, seed the generator as a stage would."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self.counter.inside:
            self.counter.seed()
        return func(*args, **(kwargs or {}))


class RecurrentAsOne(TorchFunctionMode):
    """A recurrent layer with dropout is one operation of the capture, however many draws it makes."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        self.counter.inside = True
        try:
            if _draws(args):
                self.counter.seed()
            return func(*args, **(kwargs or {}))
        finally:
            self.counter.inside = False


def _draws(args: Sequence[Any]) -> bool:
    """Tell whether a call (input, state, weights, bias, layers, dropout, train, …) draws; packed ones have one more."""
    first = next(i for i, value in enumerate(args) if isinstance(value, bool))
    return bool(args[first + 2]) and bool(args[first + 3])


@dataclass(frozen=True)
class Result:
    """What one step of the unsplit model gives."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def step(
    model: nn.Module,
    chunks: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    rows: Sequence[int],
    loss: Callable[[Any], Tensor],
    bases: Sequence[int],
) -> Result:
    """Run the chunks in order, each weighing as much as its rows; `model` is used up."""
    total = 0.0
    for (args, kwargs), size, base in zip(chunks, rows, bases, strict=True):
        weight = size / sum(rows)
        counter = Counter(base)
        with RecurrentAsOne(counter), ReseedEach(counter):
            value = loss(model(*args, **kwargs))
        value.backward(torch.full_like(value, weight))
        total += float(value.detach()) * weight
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(total, gradients, dict(model.named_buffers()))


def compare(got: LocalResult, expected: Result) -> None:
    """Raise unless loss, gradients by name and buffers agree (float sums in another order are allowed, buffers are exact)."""
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    gradients = {name: value for name, value in got.grads.items() if value is not None}
    different = sorted(gradients.keys() ^ expected.gradients.keys())
    assert not different, f"{different}: a gradient on one side only"
    largest = max(float(value.abs().max()) for value in expected.gradients.values())
    for name, value in expected.gradients.items():
        difference, size = float((gradients[name] - value).abs().max()), float(value.abs().max())
        assert difference <= max(1e-5 * size, 1e-6 * largest), f"gradient of {name}: {difference} of {size}"
    for name, value in expected.buffers.items():
        assert torch.equal(got.buffers[name], value), f"buffer {name}"


def reduce(output: Any) -> Tensor:
    """Return a loss in which every float output takes part, each with a weight of its own; its own loss if it has one."""
    own = output.get("loss") if hasattr(output, "get") else None
    if own is not None:
        return own
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([(leaf**2 * (i + 1)).mean() for i, leaf in enumerate(leaves)]).sum()
