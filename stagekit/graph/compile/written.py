"""Which parameters, buffers and constants a stage's forward writes, and which of them decide what it computes.

Whoever runs a forward that leaves no trace, or runs one again, has to put these back. Used by graph.compile.module.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from stagekit.graph.cut.stages import StageGraph
from stagekit.graph.passes.aliasing import running_stats, written_inputs


def written_states(stage: StageGraph) -> tuple[str, ...]:
    """Return the names of the states that a forward of the stage writes, through views too."""
    return tuple(stage.states[i].name for i in _written(stage))


def reread_states(stage: StageGraph) -> tuple[str, ...]:
    """Return those whose values change what the forward computes: not running statistics that it only brings forward."""
    return tuple(
        stage.states[i].name
        for i, number in _written(stage).items()
        if not all(_only_advances(node, number, stage.storages) for node in _touching(stage, number))
    )


def _written(stage: StageGraph) -> dict[int, int]:
    """Return the storage number per position of a written state."""
    numbers = {
        stage.storages[target.name]
        for node in stage.graph.nodes
        for target in written_inputs(node)
        if target.name in stage.storages
    }
    placeholders = [node for node in stage.graph.nodes if node.op == "placeholder"][len(stage.inputs) :]
    held = [stage.storages.get(node.name) for node, _ in zip(placeholders, stage.states, strict=False)]
    return {i: number for i, number in enumerate(held) if number in numbers and number is not None}


def _touching(stage: StageGraph, number: int) -> list[fx.Node]:
    return [
        node
        for node in stage.graph.nodes
        if node.op != "placeholder"
        and any(stage.storages.get(other.name) == number for other in (node, *node.all_input_nodes))
    ]


def _only_advances(node: fx.Node, number: int, storages: Mapping[str, int]) -> bool:
    """Tell whether the node writes the storage and hands nothing of its value on."""
    stats = running_stats(node)
    if stats:
        return all(other in stats for other in node.all_input_nodes if storages.get(other.name) == number)
    return not node.users and any(storages.get(target.name) == number for target in written_inputs(node))
