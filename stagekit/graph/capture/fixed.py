"""Why a size can't differ between chunks: the line of the user's code that made a symbolic size the example's number.

`math.sqrt(n)`, `float(n)` and `torch.linspace(0, 1, n)` do so without a word; a model that fails with symbolic sizes is
captured with the example's. graph.capture.export enters `NotedSizes`; the reasons go into the plan and into the error of a
step whose batch differs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stagekit.graph.capture.lines import line_here, line_of_error
from stagekit.graph.capture.specs import Leaf
from stagekit.plan.contract import FixedSize


class NotedSizes:
    """While entered, `lines` gets the user's line per size that becomes a number, under torch's name for the size."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self._original: Any = ShapeEnv._set_replacement

    def __enter__(self) -> NotedSizes:
        original, lines = self._original, self.lines

        def set_replacement(env: ShapeEnv, symbol: Any, value: Any, *args: Any, **kwargs: Any) -> None:
            if value.is_number:
                for source in env.var_to_sources.get(symbol, ()):
                    lines.setdefault(str(source.name), line_here())
            original(env, symbol, value, *args, **kwargs)

        ShapeEnv._set_replacement = set_replacement  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        ShapeEnv._set_replacement = self._original  # type: ignore[method-assign]


def fixed_sizes(
    module: nn.Module,
    leaves: Sequence[Leaf],
    wanted: Sequence[Sequence[int]],
    placeholders: Sequence[Any],
    lines: Mapping[str, str],
    failure: Exception | None,
) -> tuple[FixedSize, ...]:
    """Return a reason for each dimension in `wanted` (per leaf) that is a number in the capture's `placeholders`.

    `failure` is what ended the export with all of them symbolic, if it did not succeed.
    """
    found = []
    for index, (leaf, dims, value) in enumerate(zip(leaves, wanted, placeholders, strict=True)):
        for dim in dims:
            if not isinstance(value, Tensor) or _differs(value.size(dim)):
                continue
            line = lines.get(f"{_torch_name(module, leaf.name)}.size()[{dim}]")
            if line is not None:
                found.append(FixedSize(index, dim, f"forward computes a number from it{line}"))
            elif failure is not None:
                found.append(FixedSize(index, dim, f"forward fails where it may differ{line_of_error(failure)}"))
    return tuple(found)


def _differs(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _torch_name(module: nn.Module, name: str) -> str:
    """Return export's name for a leaf: L['x'] for "args[0]", L['mask']['key'] for "kwargs['mask']['key']"."""
    keyword = re.match(r"kwargs(\[.*)", name)
    if keyword:
        return f"L{keyword.group(1)}"
    position, rest = re.match(r"args\[(\d+)\](.*)", name).groups()  # type: ignore[union-attr]
    positional = list(inspect.signature(module.forward).parameters.values())
    for number, parameter in enumerate(positional):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return f"L['{parameter.name}'][{int(position) - number}]{rest}"
        if number == int(position):
            return f"L['{parameter.name}']{rest}"
    return name
