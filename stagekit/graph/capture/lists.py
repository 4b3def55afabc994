"""How many pieces `chunk` and `split` give: the captured graph takes as many as the example had, so other sizes may not.

Python loops over the pieces while the model is captured; torch's own shape functions decide how many there are. Called
by graph.capture; the conditions are checked with the model's own before a chunk runs.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import FloorDiv

_CHUNKS = ("aten.chunk.default", "aten.unsafe_chunk.default")
_SPLITS = ("aten.split.Tensor", "aten.unsafe_split.Tensor")


def list_conditions(graph: fx.Graph) -> list[sympy.Basic]:
    """Return conditions over export's symbols under which every operation gives as many tensors as it gave here."""
    conditions: list[sympy.Basic] = []
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            conditions += _conditions(node)
    return conditions


def _conditions(node: fx.Node) -> list[sympy.Basic]:
    target = str(node.target)
    if target in (*_CHUNKS, *_SPLITS):
        whole, number, dim = _arguments(node)
        size = _expression(whole.meta["val"].size(dim))
        step = _rounded_up(size, number) if target in _CHUNKS else number
        return [sympy.Eq(_rounded_up(size, step), len(node.meta["val"]))]
    returned = [str(each.type) for each in _schema(node).returns]
    if not target.startswith("aten.") and any(kind.startswith("List[Tensor") for kind in returned):
        return _sizes_of_operands(node)  # nobody but its author knows what decides
    return []


def _arguments(node: fx.Node) -> tuple[fx.Node, sympy.Expr, int]:
    """Return the tensor, the number of pieces or the size of a piece, and the dimension."""
    names = [argument.name for argument in _schema(node).arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    number = given["chunks"] if "chunks" in given else given["split_size"]
    return given["self"], _expression(number), given.get("dim", 0)


def _schema(node: fx.Node) -> Any:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema


def _sizes_of_operands(node: fx.Node) -> list[sympy.Basic]:
    """Return the conditions that every size that goes in is the example's."""
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    sizes = [size for value in values for size in (value.size() if isinstance(value, Tensor) else (value,))]
    return [sympy.Eq(size.node.expr, size.node.hint) for size in sizes if isinstance(size, torch.SymInt)]


def _expression(size: Any) -> sympy.Expr:
    value = size.meta["val"] if isinstance(size, fx.Node) else size
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def _rounded_up(size: sympy.Expr, step: sympy.Expr) -> sympy.Expr:
    return FloorDiv(size + step - 1, step)
