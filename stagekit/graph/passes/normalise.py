"""Turn an exported program's graph into the one flat graph that everything else works on.

In order: inline no_grad and autocast regions (each node remembers its context), give tied parameters one name, make
in-place operations functional where no other alias lives, clone a graph input that stays mutated, drop assertions and
dead code. Node names, stack traces and module paths survive. graph.capture calls `normalise`; what mutates and what
aliases is decided in graph.passes.aliasing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from stagekit.graph.capture.functions import resolve
from stagekit.graph.capture.modes import Context, corrected
from stagekit.graph.passes.aliasing import is_random, writes_memory

_ASSERTIONS = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range")


def normalise(
    source: fx.GraphModule, canonical: Mapping[str, str], calls: Sequence[Callable[..., Any]] = ()
) -> tuple[fx.Graph, dict[str, str]]:
    """Return the flat graph and the new name of each placeholder (fx renames one that is called like a builtin).

    `canonical` maps the placeholder of a tied weight to that of its canonical name; `calls` are what the recorded calls
    of custom autograd.Functions stand for.
    """
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    _copy(source, graph, values, ())
    placeholders = {node.name: values[node] for node in source.graph.nodes if node.op == "placeholder"}
    for alias, name in canonical.items():
        placeholders[alias].replace_all_uses_with(placeholders[name])
    for node in graph.nodes:
        resolve(node, calls)
    drop_assertions(graph)
    drop_dead_code(graph)
    graph.lint()
    return graph, {name: node.name for name, node in placeholders.items()}


def _copy(module: fx.GraphModule, graph: fx.Graph, values: dict[fx.Node, Any], context: Context) -> Any:
    """Copy `module`'s nodes into `graph`, regions inlined; return the mapped output argument."""
    for node in module.graph.nodes:
        if node in values:
            continue  # a placeholder of a region: already bound
        if node.op == "output":
            mapped = fx.map_arg(node.args[0], lambda n: values[n])
            if not context and module.graph is not graph and "region" not in module.meta:
                graph.output(mapped)
            return mapped
        if node.op == "get_attr" and isinstance(_attribute(module, node.target), fx.GraphModule):
            values[node] = _attribute(module, node.target)
            continue
        region = _region(node)
        if region is not None:
            entered, body, operands = region
            body_module = values[body]
            body_module.meta["region"] = True
            inner = {
                p: values[o] if isinstance(o, fx.Node) else o
                for p, o in zip(_inputs(body_module), operands, strict=True)
            }
            values[node] = _copy(body_module, graph, inner, (*context, entered))
            continue
        if node.target is operator.getitem and isinstance(values.get(node.args[0]), tuple | list):
            values[node] = values[node.args[0]][node.args[1]]
            continue
        copied = graph.node_copy(node, lambda n: values[n])
        copied.meta["context"] = corrected(context, node.meta)
        copied.args, copied.kwargs = pytree.tree_map(_any_index, (copied.args, copied.kwargs))
        values[node] = copied
    raise AssertionError("a graph without an output node")


def _any_index(leaf: Any) -> Any:
    """Burn in a device's type only: the worker says which of its devices is the current one."""
    return torch.device(leaf.type) if isinstance(leaf, torch.device) else leaf


def _region(node: fx.Node) -> tuple[tuple[Any, ...], fx.Node, tuple[Any, ...]] | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    name = node.target.name()
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *operands = node.args
        return ("grad", enabled), body, tuple(operands)  # type: ignore[return-value]
    if name == "wrap_with_autocast":
        device, dtype, enabled, cache, body, *operands = node.args
        return ("autocast", device, dtype, enabled, cache), body, tuple(operands)  # type: ignore[return-value]
    return None


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _attribute(module: fx.GraphModule, target: Any) -> Any:
    value: Any = module
    for part in str(target).split("."):
        value = getattr(value, part, None)
    return value


def drop_assertions(graph: fx.Graph) -> None:
    """Remove the checks that export left: the self-check and the step header replace them."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and any(word in str(node.target) for word in _ASSERTIONS) and not node.users:
            graph.erase_node(node)


def drop_dead_code(graph: fx.Graph) -> None:
    """Remove nodes that nobody reads, but never one that writes memory or draws random numbers."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or writes_memory(node) or is_random(node):
            continue
        graph.erase_node(node)
