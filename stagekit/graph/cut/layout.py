"""What may be cut where: classifies the nodes of a capture and lists the legal cuts and what crosses them.

A node is a *size* (an int that every stage computes from symbols), *free* (cheap, without gradient, fed by inputs and
constants only: every stage that needs it computes it again) or *work*, which exactly one stage does. graph.cut chooses
among the legal positions; graph.cut.stages builds what was chosen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, fx

from stagekit.graph.cut.costs import LINK_BYTES_PER_S, LINK_S_PER_MESSAGE, tensor_bytes
from stagekit.graph.passes.aliasing import is_random, schema_name, spans, written_inputs
from stagekit.graph.passes.propagate import line_of

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured

_HEAVY = ("mm", "conv", "attention", "linear", "matmul", "lstm", "gru", "rnn", "einsum")


@dataclass(frozen=True)
class Layout:
    """The nodes in order and what is known about cutting between them."""

    nodes: tuple[fx.Node, ...]
    work: frozenset[fx.Node]
    free: frozenset[fx.Node]
    legal: tuple[int, ...]  # positions in `nodes`: a stage may begin there

    def position(self, name: str) -> int | None:
        """Return the position of the node called `name`."""
        return next((i for i, node in enumerate(self.nodes) if node.name == name), None)

    def crossing_s(self, captured: Captured) -> list[float]:
        """Return per position the seconds that a chunk's values take to cross a cut there, both directions."""

        def seconds(node: fx.Node) -> float:
            moved = LINK_S_PER_MESSAGE + tensor_bytes(captured, node.meta["val"]) / LINK_BYTES_PER_S
            return moved * (2 if node.meta["requires_grad"] else 1)

        return self._crossing(seconds)

    def crossing_bytes(self, captured: Captured) -> list[float]:
        """Return per position the bytes of a chunk's values that cross a cut there, forward."""
        return self._crossing(lambda node: tensor_bytes(captured, node.meta["val"]))

    def _crossing(self, weigh: Callable[[fx.Node], float]) -> list[float]:
        order = {node: i for i, node in enumerate(self.nodes)}
        difference = [0.0] * (len(self.nodes) + 1)
        for node in self.work:
            value = node.meta["val"]
            last = max(
                (order.get(user, len(self.nodes) - 1) for user in node.users if user not in self.free), default=-1
            )
            if isinstance(value, Tensor) and last > order[node]:
                moved = weigh(node)
                difference[order[node] + 1] += moved
                difference[last + 1] -= moved
        total, result = 0.0, []
        for step in difference[:-1]:
            total += step
            result.append(total)
        return result


def lay_out(captured: Captured) -> Layout:
    """Classify the nodes of a capture and find its legal cuts."""
    graph = captured.graph
    nodes = tuple(node for node in graph.nodes if node.op == "call_function")
    written = {captured.storages.get(t.name) for node in graph.nodes for t in written_inputs(node)}
    movable = {node for node in graph.nodes if node.op == "placeholder" and _is_constant(captured, node, written)}
    free: set[fx.Node] = set()
    work: set[fx.Node] = set()
    for node in nodes:
        if is_size(node):
            continue
        if _is_free(captured, node, written) and all(
            n in movable or n in free or is_size(n) for n in node.all_input_nodes
        ):
            free.add(node)
        else:
            work.add(node)
    return Layout(nodes, frozenset(work), frozenset(free), tuple(_legal(captured, nodes, work)))


def held_together(captured: Captured) -> str:
    """Return in words which written state keeps the most operations in one stage, "" if none does."""
    order = {node: i for i, node in enumerate(captured.graph.nodes)}
    found = spans(captured.graph, captured.storages)
    first, last = max(found, key=lambda span: order[span[1]] - order[span[0]], default=(None, None))
    if first is None or last is None or first is last:
        return ""
    shared = {captured.storages.get(n.name) for n in (first, *first.all_input_nodes)}
    shared &= {captured.storages.get(n.name) for n in (last, *last.all_input_nodes)} - {None}
    names = [f"{o.kind} {o.name!r}" for held, o in captured.origins.items() if captured.storages.get(held) in shared]
    return (
        f"one stage holds everything from the first use of {names[0] if names else 'a tensor'}{line_of(first)} to the "
        f"last{line_of(last)}, because forward writes it in place: write it right where it is read"
    )


def is_size(node: fx.Node) -> bool:
    """Tell whether the node is a symbolic size, not a tensor."""
    return node.op == "call_function" and type(node.meta.get("val")).__name__ in (
        "SymInt",
        "SymFloat",
        "SymBool",
        "int",
        "float",
    )


def _is_constant(captured: Captured, node: fx.Node, written: set[int | None]) -> bool:
    origin = captured.origins[node.name]
    if origin.kind == "parameter" or node.meta.get("requires_grad"):
        return False
    return not isinstance(node.meta["val"], Tensor) or captured.storages.get(node.name, -1) not in written


def _is_free(captured: Captured, node: fx.Node, written: set[int | None]) -> bool:
    if node.meta["requires_grad"] or is_random(node) or captured.storages.get(node.name, -1) in written:
        return False
    name = schema_name(node).removeprefix("aten::")
    return not written_inputs(node) and not any(word in name for word in _HEAVY)


def _legal(captured: Captured, nodes: tuple[fx.Node, ...], work: set[fx.Node]) -> Iterator[int]:
    order = {node: i for i, node in enumerate(nodes)}
    blocked = [0] * (len(nodes) + 1)
    held = [(order[a], order[b]) for a, b in spans(captured.graph, captured.storages)]
    for node in nodes:
        if not isinstance(node.meta["val"], Tensor) and node in work:
            held.append((order[node], max((order.get(user, order[node]) for user in node.users), default=order[node])))
    for first, last in held:
        blocked[first + 1] += 1
        blocked[last + 1] -= 1
    depth, seen_work = 0, False
    for i, node in enumerate(nodes):
        depth += blocked[i]
        if node in work:
            if depth == 0 and seen_work and node.target is not operator.getitem:
                yield i
            seen_work = True
