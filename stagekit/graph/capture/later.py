"""Does forward run other operations in a later call? What it counts in attributes may decide so in ways nobody can follow.

A copy of the model is called again and again, and each call's operations, constants and shapes are compared with those of
the second call. That finds a decision however it is written (`self.n in {6, 9}`, `len(self.seen) == 6`), as far as the
calls go. Called by graph.capture.selfcheck, only for models that change plain attributes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagekit.graph.capture.counters import Attributes, plain_attributes, put

_MOST = 100  # calls
_LEAST = 10  # also of a slow model
_SECONDS = 1.0
_KINDS = 4  # of calls with other operations that are looked at


class _Operations(TorchDispatchMode):
    """Notes what runs: operators, constants, shapes and dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        self.ran.append((str(func), *(_shown(leaf) for leaf in leaves)))
        return func(*args, **(kwargs or {}))


def _shown(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)


def other_calls(
    model: nn.Module, call: Callable[[nn.Module], object], before: Attributes
) -> Iterator[tuple[int, Attributes]]:
    """Yield the number and the attributes before it of each later call that runs other operations than the second.

    `model` is used up; `before` are the attributes that change, as they were before the second call.
    """
    put(model, before)
    second = _operations(model, call)
    kinds = [second]
    began = time.monotonic()
    for number in range(3, _MOST):
        if number > _LEAST and time.monotonic() - began > _SECONDS:
            return
        values = {place: value for place, value in plain_attributes(model).items() if place in before}
        ran = _operations(model, call)
        if ran is None:  # the model's own error, as in its own loop
            return
        if ran not in kinds:
            kinds.append(ran)
            yield number, values
        if len(kinds) > _KINDS:
            return


def _operations(model: nn.Module, call: Callable[[nn.Module], object]) -> list[Any] | None:
    """Return what one call runs, None if it fails."""
    torch.manual_seed(0)
    operations = _Operations()
    with torch.enable_grad(), operations:
        try:
            call(model)
        except Exception:
            return None
    return operations.ran
