"""Do the stages, one after another, compute exactly what the capture computes, and do they keep the stage contract?

A proof on graphs, without values: every operation of the capture is in the stages it belongs to, with the same
operands, in the same order and in the same regions; values travel forward over edges that exist; memory that is
written has one owner; nothing that goes out shares memory with what came in. graph.cut calls it for every cut, also
on workers. A failure is a fault of ours, never the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from stagekit.errors import BugError
from stagekit.graph.compile.randomness import reseed
from stagekit.graph.cut.layout import Layout, is_size
from stagekit.graph.passes.aliasing import random_numbers, written_inputs
from stagekit.graph.passes.regions import closes_region, opens_region
from stagekit.plan.contract import InputRef, SymbolRef, ValueRef

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured
    from stagekit.graph.cut.stages import Chain, StageGraph

Sources = dict[fx.Node, str]  # node of a stage → name of the capture's node that it stands for


def verify_chain(captured: Captured, layout: Layout, stage_of: Mapping[fx.Node, int], chain: Chain) -> None:
    """Raise BugError, naming the stage and the operation, unless the chain is the capture."""
    by_name = {node.name: node for node in captured.graph.nodes}
    order = {name: i for i, name in enumerate(by_name)}
    numbers = {node.name: k for node, k in random_numbers(captured.graph).items()}
    placed: dict[str, list[int]] = {}
    for stage in chain.stages:
        sources = _sources(captured, stage)
        _check_operations(stage, sources, by_name, order)
        _check_seeds(stage, sources, numbers)
        _check_memory(stage)
        for node, name in sources.items():
            if node.op == "call_function":
                placed.setdefault(name, []).append(stage.index)
    _check_places(layout, stage_of, placed)
    _check_states(captured, chain)
    _check_edges(chain)
    _check_results(captured, chain)


def _sources(captured: Captured, stage: StageGraph) -> Sources:
    placeholders = [node for node in stage.graph.nodes if node.op == "placeholder"]
    inputs = {origin.index: name for name, origin in captured.origins.items() if origin.kind == "input"}
    sources: Sources = {}
    for node, source in zip(placeholders, (*stage.inputs, *stage.states), strict=False):
        match source:
            case InputRef(index):
                sources[node] = inputs[index]
            case ValueRef(value):
                sources[node] = value
            case SymbolRef():
                pass
            case origin:
                sources[node] = node.meta["copied_from"]
                if captured.origins[sources[node]] != origin:
                    raise BugError(f"stage {stage.index}: {node} holds {sources[node]} and is given {origin}")
    for node in stage.graph.nodes:
        if node.op == "call_function" and "copied_from" in node.meta:
            sources[node] = node.meta["copied_from"]
    return sources


def _check_operations(
    stage: StageGraph, sources: Sources, by_name: Mapping[str, fx.Node], order: Mapping[str, int]
) -> None:
    last, context = -1, []
    for node in stage.graph.nodes:
        if opens_region(node):
            context.append(node)
        elif closes_region(node):
            context.pop()
        if node.op != "call_function" or node not in sources:
            continue
        original = by_name[sources[node]]
        if order[original.name] <= last:
            raise BugError(f"stage {stage.index}: {original} runs out of order")
        last = order[original.name]
        if len(context) != len(original.meta.get("context", ())):
            raise BugError(f"stage {stage.index}: {original} runs in another region than in the model")
        if node.target is not original.target or not _same_operands(node, original, sources):
            raise BugError(f"stage {stage.index}: {node.format_node()} is not {original.format_node()}")


def _same_operands(node: fx.Node, original: fx.Node, sources: Sources) -> bool:
    mine, form = pytree.tree_flatten((node.args, dict(node.kwargs)))
    theirs, other_form = pytree.tree_flatten((original.args, dict(original.kwargs)))
    return form == other_form and all(_same(a, b, sources) for a, b in zip(mine, theirs, strict=True))


def _same(mine: Any, theirs: Any, sources: Sources) -> bool:
    if not isinstance(theirs, fx.Node):
        return type(mine) is type(theirs) and (mine is theirs or mine == theirs or mine != mine)
    if is_size(theirs):
        return not isinstance(mine, fx.Node) or mine not in sources  # computed from the stage's symbols
    return isinstance(mine, fx.Node) and sources.get(mine) == theirs.name


def _check_seeds(stage: StageGraph, sources: Sources, numbers: Mapping[str, int]) -> None:
    """Each random operation follows its own reseed: its number among the capture's random operations."""
    for node, name in sources.items():
        if node.op != "call_function" or name not in numbers:
            continue
        if node.prev.target is not reseed or node.prev.args[1] != numbers[name]:
            raise BugError(f"stage {stage.index}: {name} is not seeded as operation {numbers[name]}")


def _check_memory(stage: StageGraph) -> None:
    """No input is written, and no output shares memory with an input, as the fake run of the stage saw it."""
    placeholders = [node.name for node in stage.graph.nodes if node.op == "placeholder"]
    given = {stage.storages[name] for name in placeholders if name in stage.storages}
    inputs = {stage.storages[name] for name in placeholders[: len(stage.inputs)] if name in stage.storages}
    for node in stage.graph.nodes:
        for target in written_inputs(node):
            if stage.storages.get(target.name) in inputs:
                raise BugError(f"stage {stage.index}: {node} writes into an input of the stage")
        if node.op == "output":
            for value in node.all_input_nodes:
                if stage.storages.get(value.name) in given:
                    raise BugError(f"stage {stage.index}: its output {value} shares memory with what it was given")


def _check_places(layout: Layout, stage_of: Mapping[fx.Node, int], placed: Mapping[str, list[int]]) -> None:
    for node in layout.work:
        if placed.get(node.name) != [stage_of[node]]:
            raise BugError(f"{node} belongs to stage {stage_of[node]}, but is in {placed.get(node.name)}")
    allowed = {node.name for node in (*layout.work, *layout.free)}
    if not placed.keys() <= allowed:
        raise BugError(f"{sorted(placed.keys() - allowed)} are in stages and are neither work nor free")


def _check_states(captured: Captured, chain: Chain) -> None:
    """Memory that some operation writes is held by one stage only."""
    holders: dict[str, list[int]] = {}
    for stage in chain.stages:
        for state in stage.states:
            holders.setdefault(state.name, []).append(stage.index)
    written = {captured.storages.get(t.name) for node in captured.graph.nodes for t in written_inputs(node)} - {None}
    for name, origin in captured.origins.items():
        if origin.kind != "input" and captured.storages.get(name) in written and len(holders.get(origin.name, ())) > 1:
            raise BugError(f"{origin.name} is written in place and held by stages {holders[origin.name]}")


def _check_edges(chain: Chain) -> None:
    made = {name: stage.index for stage in chain.stages[:-1] for name in stage.outputs}
    read: dict[str, list[int]] = {}
    for stage in chain.stages:
        for source in stage.inputs:
            if isinstance(source, ValueRef):
                read.setdefault(source.value, []).append(stage.index)
    edges = {edge.value: (edge.source, list(edge.targets)) for edge in chain.edges}
    expected = {name: (index, read.get(name, [])) for name, index in made.items()}
    if edges != expected or not all(source < min(targets, default=source) for source, targets in edges.values()):
        raise BugError(f"edges {edges} are not what stages make and read: {expected}")
    for edge in chain.edges:
        dtype: torch.dtype = getattr(torch, edge.tensor.dtype)
        if edge.tensor.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise BugError(f"{edge.value} is {edge.tensor.dtype} and can have no gradient")


def _check_results(captured: Captured, chain: Chain) -> None:
    output = next(node for node in captured.graph.nodes if node.op == "output")
    leaves = list(pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None))
    last = chain.stages[-1]
    for leaf, spec in zip(leaves, chain.outputs, strict=True):
        is_value = isinstance(leaf, fx.Node) and not is_size(leaf)
        if is_value != (spec.value is not None) or (is_value and spec.value not in last.outputs):
            raise BugError(f"the model's output {leaf} is not what the last stage returns ({spec})")
