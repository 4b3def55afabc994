"""Branches on a random draw whose outcome is the same for every draw: `torch.rand([]) < 0.0` is False.

Layers are dropped with such a comparison in many models; at a rate of 0 (or 1) it decides nothing, so a capture may take
the branch. The draw stays in the graph, as it moves the generator. At any other rate the branch is refused like all
branches on values. graph.capture.export enters `ConstantDraws`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_UNIFORM = (torch.rand, torch.rand_like)  # of [0, 1)
_COMPARISONS: dict[Any, tuple[Callable[[Any, Any], bool], ...]] = {}
for _names, _compare in (
    (("lt", "less", "__lt__"), operator.lt),
    (("le", "less_equal", "__le__"), operator.le),
    (("gt", "greater", "__gt__"), operator.gt),
    (("ge", "greater_equal", "__ge__"), operator.ge),
):
    for _name in _names:
        for _owner in (torch, Tensor):
            if hasattr(_owner, _name):
                _COMPARISONS[getattr(_owner, _name)] = (_compare,)
_LARGEST_DRAW = 1 - 2**-24  # float32 draws are multiples of this step


class ConstantDraws(TorchFunctionMode):
    """While entered, a comparison of a uniform draw that no draw can change is a constant when a branch asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self._draws = WeakIdKeyDictionary()
        self._known = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0] in self._known:
            return self._known[args[0]]
        result = func(*args, **(kwargs or {}))
        if func in _UNIFORM and isinstance(result, Tensor):
            self._draws[result] = True
        elif func in _COMPARISONS and len(args) == 2:
            self._compared(_COMPARISONS[func][0], args, result)
        return result

    def _compared(self, compare: Callable[[Any, Any], bool], args: tuple[Any, Any], result: Any) -> None:
        left, right = args
        if isinstance(left, Tensor) and left in self._draws and isinstance(right, int | float):
            outcomes = {compare(0.0, right), compare(_LARGEST_DRAW, right)}
            if len(outcomes) == 1 and isinstance(result, Tensor):
                self._known[result] = outcomes.pop()
