"""What stages would hold in memory: parameters with gradients and optimizer state, and what autograd saves of a chunk.

Nothing real is made: the capture runs once on fake tensors under saved-tensor hooks. An estimate: temporaries count as
the largest single operation, fragmentation and the framework not at all. graph.cut.choose hands it to plan.partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from stagekit.errors import SplitError
from stagekit.graph.cut.costs import tensor_bytes
from stagekit.graph.passes.aliasing import storage_number
from stagekit.graph.passes.propagate import run_node
from stagekit.plan.memory import Footprint, Held, Memory, in_units
from stagekit.plan.partition import Partition

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured
    from stagekit.graph.cut.layout import Layout


def footprint(captured: Captured, layout: Layout, *, optimizer_state: float, recompute: bool) -> Footprint:
    """Estimate what each node makes its stage hold.

    With `recompute` a stage keeps what it received of each chunk, and what autograd saves of one chunk at a time.
    """
    order = {node: i for i, node in enumerate(layout.nodes)}
    saved, storage_of = _saved(captured, order)
    held = _states(captured, layout, order, optimizer_state)
    for size, positions in saved.values():
        held.append(Held(tuple(sorted(positions)), size if recompute else 0, 0 if recompute else size))
    kept = set() if recompute else set(saved)
    received = [0] * (len(layout.nodes) + 1)
    for node in layout.work:
        value = node.meta["val"]
        last = max((order.get(user, -1) for user in node.users if user not in layout.free), default=-1)
        if isinstance(value, Tensor) and last > order[node] and storage_of.get(node) not in kept:
            size = tensor_bytes(captured, value)
            received[order[node] + 1] += size
            received[last + 1] -= size
    for i in range(1, len(received)):
        received[i] += received[i - 1]
    largest = max((_touched(captured, node) for node in layout.work), default=0)
    return Footprint(tuple(held), tuple(received), largest)


def _states(captured: Captured, layout: Layout, order: Mapping[fx.Node, int], optimizer_state: float) -> list[Held]:
    held = []
    for node in captured.graph.nodes:
        origin = captured.origins.get(node.name) if node.op == "placeholder" else None
        if origin is None or origin.kind == "input":
            continue
        positions = sorted(order[user] for user in node.users if user in order)
        factor = 2 + optimizer_state if origin.kind == "parameter" and node.meta["requires_grad"] else 1
        if positions:
            held.append(Held(tuple(positions), math.ceil(tensor_bytes(captured, node.meta["val"]) * factor)))
    return held


def _touched(captured: Captured, node: fx.Node) -> int:
    return sum(tensor_bytes(captured, n.meta["val"]) for n in (node, *node.all_input_nodes))


def _saved(
    captured: Captured, order: Mapping[fx.Node, int]
) -> tuple[dict[int, tuple[int, set[int]]], dict[fx.Node, int | None]]:
    """Return, per storage that autograd saves, its bytes and the positions of the nodes that save it (no weights), and
    the storage of each node's value."""
    saved: dict[int, tuple[int, set[int]]] = {}
    keep: list[Tensor] = []  # so that no storage number is given twice
    values: dict[fx.Node, Any] = {}
    states: set[int] = set()
    at = [0]

    def pack(tensor: Tensor) -> Tensor:
        number = tensor.untyped_storage()._cdata
        if number not in states:
            saved.setdefault(number, (tensor_bytes(captured, tensor), set()))[1].add(at[0])
            keep.append(tensor)
        return tensor

    with captured.mode, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for node in captured.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                if isinstance(value, Tensor):
                    value = value.detach().requires_grad_(node.meta["requires_grad"])
                    if captured.origins[node.name].kind != "input":
                        states.add(value.untyped_storage()._cdata)
                values[node] = value
            elif node.op != "output":
                at[0] = order[node]
                values[node] = run_node(node, values)
    return saved, {node: storage_number(value) for node, value in values.items()}


def cut_within(
    solve: Callable[[Memory], Partition], found: Footprint, cap_bytes: float, in_flight: Sequence[int]
) -> tuple[Partition, int]:
    """Return a partition whose stages fit `cap_bytes` with what they receive counted in, and what its largest one holds.

    What a stage receives depends on where it begins, so the partition first assumes nothing and then, while its
    stages do not fit, as much as the worst of them receives. Raises SplitError.
    """
    memory = Memory(found.held, tuple(in_flight), cap_bytes, found.workspace_bytes)
    allowance = 0
    for _ in range(4):
        assumed = Held(tuple(range(len(found.received) - 1)), 0, allowance)
        cut = solve(replace(memory, held=(*found.held, assumed)))
        ends = [*cut.begins[1:], len(found.received) - 1]
        received = [found.received[begin] for begin in cut.begins]
        needs = [
            memory.stage_bytes(k, begin, end) + memory.chunks[k] * received[k]
            for k, (begin, end) in enumerate(zip(cut.begins, ends, strict=True))
        ]
        if max(needs) <= cap_bytes:
            return cut, max(needs)
        allowance = max(allowance + 1, *received)
    raise SplitError(
        f"no cut was found that fits the memory cap of {in_units(cap_bytes)}: the last one tried needs "
        f"{in_units(max(needs))} in stage {needs.index(max(needs))}; use more stages, smaller or fewer chunks, or recompute"
    )
