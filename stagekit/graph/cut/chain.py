"""A capture as the planner takes it: its operations in order with their costs, and where it may be cut. Called by stagekit.planning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stagekit.graph.cut.costs import Cost, trained_weight_of
from stagekit.graph.cut.layout import Layout
from stagekit.plan.memory import Footprint
from stagekit.plan.planner.chain import Chain

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured


def chain_of(
    captured: Captured,
    layout: Layout,
    costs: Mapping[str, Cost],
    *,
    legal: Sequence[int],
    footprint: Footprint | None,
) -> Chain:
    """Return the chain of a capture at its example's sizes. Positions are those of `layout.nodes`."""
    nothing = Cost(0.0, 0.0)
    of_nodes = [costs.get(node.name, nothing) for node in layout.nodes]
    weights: list[str | None] = []
    readers: dict[str, list[int]] = defaultdict(list)
    order = {node: i for i, node in enumerate(layout.nodes)}
    for node, cost in zip(layout.nodes, of_nodes, strict=True):
        weight = trained_weight_of(captured, node) if cost.halves else None
        weights.append(weight.name if weight is not None else None)
        if weight is not None and weight.name not in readers:
            readers[weight.name] += sorted(order[user] for user in weight.users if user in order)
    halves = [cost.halves or (cost.backward_s, 0.0) for cost in of_nodes]
    return Chain(
        forward=tuple(cost.forward_s for cost in of_nodes),
        backward=tuple(cost.backward_s for cost in of_nodes),
        input_grad=tuple(early for early, _ in halves),
        weight_grad=tuple(late for _, late in halves),
        weights=tuple(weights),
        crossing_s=tuple(layout.crossing_s(captured)),
        crossing_bytes=tuple(layout.crossing_bytes(captured)),
        legal=tuple(legal),
        readers={name: tuple(positions) for name, positions in readers.items()},
        footprint=footprint,
    )
