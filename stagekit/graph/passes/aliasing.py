"""What a node does to memory: what it writes, whether it draws random numbers, which values share storage.

`functionalise` replaces an in-place operation by its functional twin where no other alias of the written value is
alive; `spans` lists the stretches of the graph that a cut must not part, because their nodes share written memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from stagekit.graph.capture.functions import traits_of
from stagekit.graph.passes.operators import is_foreign, may_draw

# torch differentiates these in place, but not their functional twins
_WITHOUT_DERIVATIVE = frozenset(
    ("copy", "zero", "random", "uniform", "bernoulli", "exponential", "log_normal", "cauchy", "geometric")
)
_RUNNING_STATS = {"aten::batch_norm": (3, 4, 5), "aten::instance_norm": (3, 4, 5), "aten::native_batch_norm": (3, 4, 5)}


def schema_name(node: fx.Node) -> str:
    """Return "aten::add_" for a call of an operator overload, "" for anything else."""
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


def is_random(node: fx.Node) -> bool:
    """Tell whether the node draws from the default generator when it runs."""
    if not isinstance(node.target, torch._ops.OpOverload):
        traits = traits_of(node.target)
        return traits is not None and traits.draws
    name, given = schema_name(node), named_arguments(node)
    if name in ("aten::dropout", "aten::feature_dropout", "aten::dropout_", "aten::alpha_dropout"):
        return given["train"] is True and given["p"] != 0.0
    if name == "aten::scaled_dot_product_attention":
        return bool(given.get("dropout_p", 0.0))
    if name in ("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"):
        return given["train"] is True and bool(given["dropout"])
    return torch.Tag.nondeterministic_seeded in node.target.tags or _draws_untagged(node)


def _draws_untagged(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and is_foreign(target)
        and may_draw(node)
    )


def random_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of each random operation, which its seed depends on.

    Operators without torch's tag come after all others: what dropout draws does not depend on whether one can be watched.
    """
    found = sorted(filter(is_random, graph.nodes), key=_draws_untagged)
    return {node: k for k, node in enumerate(found)}


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the given arguments of an operator overload by their names in its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = (argument.name for argument in node.target._schema.arguments)
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory this node writes: by its schema, or running statistics that no schema declares."""
    if not isinstance(node.target, torch._ops.OpOverload):
        traits = traits_of(node.target)
        return [node.args[i] for i in traits.written] if traits is not None else []  # type: ignore[misc]
    if schema_name(node) in _RUNNING_STATS:
        return running_stats(node)
    written: list[fx.Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node)]
    return written


def running_stats(node: fx.Node) -> list[fx.Node]:
    """Return the running statistics that a norm operator in training brings forward without computing from them."""
    if schema_name(node) not in _RUNNING_STATS:
        return []
    mean, var, training = _RUNNING_STATS[schema_name(node)]
    if not node.args[training]:
        return []
    return [arg for arg in (node.args[mean], node.args[var]) if isinstance(arg, fx.Node)]


def writes_memory(node: fx.Node) -> bool:
    """Tell whether the node writes memory that existed before it."""
    return bool(written_inputs(node))


def functional_twin(node: fx.Node) -> Any:
    """Return the overload that computes, and differentiates, what an in-place node writes, or None.

    Only torch's own names say so: an operator of the user's that is called like another one may be anything.
    """
    namespace, _, name = schema_name(node).partition("::")
    base = name.removesuffix("_")
    if namespace != "aten" or base == name or name.endswith("__"):
        return None
    if base in _WITHOUT_DERIVATIVE and _records(node) and any(n.meta["requires_grad"] for n in node.all_input_nodes):
        return None
    twin = getattr(getattr(torch.ops.aten, base, None), node.target._overloadname, None)  # type: ignore[union-attr]
    return twin if twin is not None and _takes(twin) == _takes(node.target) else None


def _takes(overload: Any) -> list[str]:
    return [str(argument.type) for argument in overload._schema.arguments]


def functionalise(graph: fx.Graph, storage_of: Mapping[str, int], kept: frozenset[int]) -> bool:
    """Make in-place nodes functional where the written value's storage has no other live alias; tell if any changed.

    `storage_of`: storage number per node name. `kept`: storages of parameters, buffers and constants, left alone.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    sharing = nodes_by_storage(graph, storage_of)
    changed = False
    for node in list(graph.nodes):
        written = written_inputs(node)
        twin = functional_twin(node) if len(written) == 1 else None
        if twin is None or node.args[0] is not written[0] or storage_of.get(written[0].name) in kept:
            continue
        target = written[0]
        aliases = [other for other in sharing.get(storage_of.get(target.name, -1), ()) if other not in (target, node)]
        lives = any(order[alias] < order[node] < order[user] for alias in aliases for user in alias.users)
        if lives or _may_promote(node) or _keeps_gradient(node, target):
            continue
        node.target = twin
        target.replace_all_uses_with(node, delete_user_cb=lambda user, at=order[node]: order[user] > at)
        changed = True
    return changed


def nodes_by_storage(graph: fx.Graph, storage_of: Mapping[str, int]) -> dict[int, list[fx.Node]]:
    """Return the nodes that live in each storage."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.name in storage_of:
            found.setdefault(storage_of[node.name], []).append(node)
    return found


def _keeps_gradient(node: fx.Node, target: fx.Node) -> bool:
    """Tell whether the written value stays a part of autograd's graph though the write is not recorded."""
    return not _records(node) and bool(target.meta.get("requires_grad"))


def _records(node: fx.Node) -> bool:
    """Tell whether autograd records the node."""
    return bool(next((values[0] for kind, *values in reversed(node.meta.get("context", ())) if kind == "grad"), True))


def _may_promote(node: fx.Node) -> bool:
    """Tell whether the functional twin could return another dtype than the in-place node writes."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return len({value.dtype for value in values if isinstance(value, Tensor) and value.ndim}) > 1


def spans(graph: fx.Graph, storage_of: Mapping[str, int]) -> list[tuple[fx.Node, fx.Node]]:
    """Return (first, last) node pairs that one stage must hold together: they touch memory that one of them writes."""
    written = {storage_of[t.name] for node in graph.nodes for t in written_inputs(node) if t.name in storage_of}
    touching: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        touched = {storage_of.get(n.name) for n in (node, *node.all_input_nodes)}
        for storage in touched & written:
            touching.setdefault(storage, []).append(node)  # type: ignore[arg-type]
    return [(nodes[0], nodes[-1]) for nodes in touching.values()]


def storage_number(value: Any) -> int | None:
    """Return a number that tensors share if and only if they share memory; None for no single tensor."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
