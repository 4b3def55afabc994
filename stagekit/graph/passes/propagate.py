"""Run a flat graph on fake tensors with autograd on: shapes, strides, requires_grad and shared storage per node.

`node.meta["val"]` of an export says requires_grad=False for values that do need a gradient; this run says the truth.
Called by graph.capture after each pass and by graph.cut.stages for the edges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from stagekit.errors import CaptureError
from stagekit.graph.passes.aliasing import storage_number


@contextlib.contextmanager
def entered(context: tuple[tuple[Any, ...], ...]) -> Iterator[None]:
    """Run a node as its context says: no_grad and autocast regions, outermost first."""
    with contextlib.ExitStack() as stack:
        for kind, *values in context:
            stack.enter_context(context_manager(kind, values))
        yield


def context_manager(kind: str, values: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager that a region of the capture stands for."""
    if kind == "grad":
        return torch.set_grad_enabled(values[0])
    device, dtype, enabled, cache = values
    return torch.autocast(device_type=device, dtype=dtype, enabled=enabled, cache_enabled=cache)


def propagate(graph: fx.Graph, fakes: Mapping[str, Any], mode: FakeTensorMode) -> dict[str, int]:
    """Run `graph`, set each node's meta "val", "requires_grad" and "reached"; return the storage number per node name.

    "reached": the gradient of some output depends on the value, in place writes included. `fakes`: a fake tensor or
    constant per placeholder name. Raises CaptureError naming the user's line.
    """
    values: dict[fx.Node, Any] = {}
    storages: dict[str, int] = {}
    outputs: list[Any] = []
    with mode, torch.enable_grad():
        for node in graph.nodes:
            if node.op == "output":
                outputs = [values[n] for n in node.all_input_nodes]
                continue
            values[node] = fakes[node.name] if node.op == "placeholder" else run_node(node, values)
            number = storage_number(values[node])
            if number is not None:
                storages[node.name] = number
        reached = _reached_by(outputs)
        for node, value in values.items():
            node.meta["reached"] = _flowing_edge(value) in reached
    for node, value in values.items():
        node.meta["val"] = value.detach() if isinstance(value, Tensor) else _detached(value)
        node.meta["requires_grad"] = isinstance(value, Tensor) and value.requires_grad
    return storages


def _edge_of(value: Tensor) -> tuple[Any, int]:
    if value.grad_fn is None and value._is_view():  # a fake view taken under no_grad: nothing flows back through it
        return None, 0
    edge = torch.autograd.graph.get_gradient_edge(value)
    return edge.node, edge.output_nr


def _flowing_edge(value: Any) -> tuple[Any, int] | None:
    """Return the edge that a gradient of `value` flows into; None where none does."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    try:
        edge = _edge_of(value)
    except RuntimeError:  # one of several views of memory that was written later: autograd lets nobody read it any more
        return None
    return edge if edge[0] is not None else None


def _reached_by(outputs: list[Any]) -> set[tuple[Any, int]]:
    """Return the gradient edges (autograd node, number of its output) that backward passes from `outputs`."""
    reached = {edge for value in outputs if (edge := _flowing_edge(value)) is not None}
    for node in autograd_nodes([node for node, _ in reached]):
        reached |= {(following, number) for following, number in node.next_functions if following is not None}
    return reached


def autograd_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield each autograd node that backward passes from the nodes `roots`, once."""
    todo = list(roots)
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        todo += [following for following, _ in node.next_functions if following is not None]


def _detached(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(item.detach() if isinstance(item, Tensor) else item for item in value)
    return value


def run_node(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return what a node gives for fake `values`, in its context. Raises CaptureError naming the user's line."""
    if node.op != "call_function":
        raise CaptureError(f"the capture holds a {node.op} of {node.target}{line_of(node)}; control flow can't be cut")
    args = fx.map_arg(node.args, lambda n: values[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
    try:
        # without the dispatcher, kernels that decompose in C++ ask for concrete sizes: symbols become the example's size
        with entered(node.meta.get("context", ())), enable_python_dispatcher():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        raise CaptureError(f"{node.name} ({node.target}){line_of(node)}: {type(error).__name__}: {error}") from error


def line_of(node: fx.Node) -> str:
    """Return " at file:line in name" of the user's innermost line that made the node, or ""."""
    lines = [
        line.strip()
        for line in str(node.meta.get("stack_trace") or "").splitlines()
        if line.strip().startswith("File ")
    ]
    own = [line for line in lines if "/torch/" not in line] or lines
    return f" at {own[-1].removeprefix('File ')}" if own else ""
