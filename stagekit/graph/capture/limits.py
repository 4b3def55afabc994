"""The longest sequence that a model's tables hold: positions made by `arange(length)` and looked up in an embedding.

Such a limit is no branch and no shape, so export does not see it, and a longer sequence would fail in the middle of a
step. Called by graph.capture; the limits become the largest sizes of symbols, checked before a chunk runs.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from stagekit.graph.capture.symbols import SymbolTable

_SAME_VALUES = [
    "aten.unsqueeze.default",
    "aten.view.default",
    "aten.reshape.default",
    "aten.expand.default",
    "aten.clone.default",
    "aten.alias.default",
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.device",
    "aten.to.dtype_layout",
    "aten.squeeze.dim",
    "aten.contiguous.default",
    "aten.detach.default",
    "aten.repeat.default",
    "aten.flatten.using_ints",
]


def table_limits(graph: fx.Graph, table: SymbolTable) -> dict[str, int]:
    """Return the largest size per symbol, by our names, for which every position is inside its table.

    Only values that nothing selects from are followed: a limit must never refuse a size that works.
    """
    largest: dict[fx.Node, sympy.Expr] = {}
    limits: dict[str, int] = {}
    for node in graph.nodes:
        bound = _largest(node, largest)
        if bound is not None:
            largest[node] = bound
        if str(node.target) != "aten.embedding.default" or node.args[1] not in largest:
            continue
        for name, limit in _limit(largest[node.args[1]], node.args[0], table).items():
            limits[name] = min(limit, limits.get(name, limit))
    return limits


def _largest(node: fx.Node, known: dict[fx.Node, sympy.Expr]) -> sympy.Expr | None:
    """Return the largest value in a tensor of positions, None for any other tensor."""
    target = str(node.target)
    if target == "aten.arange.default":
        return _expression(node.args[0]) - 1
    if target == "aten.arange.start":
        return _expression(node.args[1]) - 1
    if target in _SAME_VALUES and node.args[0] in known:
        return known[node.args[0]]  # type: ignore[index]
    if target == "aten.add.Tensor" and node.args[0] in known and isinstance(node.args[1], int):
        return known[node.args[0]] + node.args[1]  # type: ignore[index]
    return None


def _expression(size: Any) -> sympy.Expr:
    value = size.meta["val"] if isinstance(size, fx.Node) else size
    if isinstance(value, torch.SymInt):
        return value.node.expr
    return sympy.Integer(value) if isinstance(value, int) else sympy.oo


def _limit(largest: sympy.Expr, weight: Any, table: SymbolTable) -> dict[str, int]:
    held = weight.meta["val"] if isinstance(weight, fx.Node) else None
    symbols = [s for s in largest.free_symbols if s in table.names]
    if not isinstance(held, Tensor) or not isinstance(held.size(0), int) or len(symbols) != 1:
        return {}
    above = largest - symbols[0]
    if not above.is_Integer:
        return {}
    return {table.names[symbols[0]]: held.size(0) - 1 - int(above)}
