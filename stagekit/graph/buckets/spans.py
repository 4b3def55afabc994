"""Stretches of a graph that one bucket must hold: nodes that share memory which one of them writes.

Compilers refuse, or get wrong, a value that is written while an alias of it lives in another bucket. Takes graphs of any
origin: what shares memory is read off the values that captures and dynamo note, or found by a run on fake tensors.
Called by graph.bucket and graph.cut.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from stagekit.graph.buckets.fakes import fake_values
from stagekit.graph.passes.aliasing import written_inputs
from stagekit.graph.passes.regions import closes_region, opens_region

_IN_PLACE = {
    getattr(operator, f"i{name}")
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
}


def written_spans(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[tuple[fx.Node, fx.Node]]:
    """Return (first, last) pairs of nodes of `gm` that belong into one bucket. Nothing real runs."""
    written = {node: targets for node in gm.graph.nodes if (targets := _written(gm, node))}
    if not written:
        return []
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    noted = all(
        {"val", "example_value"} & node.meta.keys() or opens_region(node) or closes_region(node) for node in calls
    )
    values = {node: node.meta.get("val", node.meta.get("example_value")) for node in gm.graph.nodes}
    return spans(gm.graph, written, values if noted else fake_values(gm, example_inputs))


def spans(
    graph: fx.Graph, written: Mapping[fx.Node, Sequence[fx.Node]], values: Mapping[fx.Node, Any]
) -> list[tuple[fx.Node, fx.Node]]:
    """Return (first, last) of the nodes that touch each written storage; `values` are fake."""
    storages = {node: _storages(value) for node, value in values.items()}
    targets = {storage for nodes in written.values() for node in nodes for storage in storages.get(node, ())}
    touching: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op.startswith("call_"):
            touched = {s for n in (node, *node.all_input_nodes) for s in storages.get(n, ())}
            for storage in touched & targets:
                touching.setdefault(storage, []).append(node)
    return [(nodes[0], nodes[-1]) for nodes in touching.values()]


def _storages(value: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}


def _written(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Return the operands whose memory a node writes, by its schema or its name."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return written_inputs(node)
    first = [node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return [out]
    if node.op == "call_module":
        return first if getattr(gm.get_submodule(str(node.target)), "inplace", False) else []
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op.startswith("call_") and (
        is_in_place or node.target in (*_IN_PLACE, operator.setitem) or node.kwargs.get("inplace")
    ):
        return first
    return []
