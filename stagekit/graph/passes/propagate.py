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
from torch.utils import _pytree as pytree

from stagekit.errors import CaptureError
from stagekit.graph.passes.aliasing import storage_number
from stagekit.graph.passes.regions import closes_region, opens_region


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

    It runs at the example's sizes, which costs a fraction of symbolic ones. A "val" that says the same at these sizes
    stays, any other is computed again (a functional twin may be laid out otherwise). "reached": the gradient of some
    output depends on the value, in place writes included. `fakes`: a fake tensor or constant per placeholder name.
    Raises CaptureError naming the user's line.
    """
    values: dict[fx.Node, Any] = {}
    storages: dict[str, int] = {}
    outputs: list[Any] = []
    with mode, torch.enable_grad():
        for node in graph.nodes:
            if node.op == "output":
                outputs = [values[n] for n in node.all_input_nodes]
                continue
            if node.op == "placeholder":
                node.meta["val"] = pytree.tree_map_only(Tensor, Tensor.detach, fakes[node.name])
                values[node] = _at_example(fakes[node.name])
            else:
                values[node] = run_node(node, values)
                _describe(node, values[node])
            number = storage_number(values[node])
            if number is not None:
                storages[node.name] = number
        reached = _reached_by(outputs)
        for node, value in values.items():
            node.meta["reached"] = _flowing_edge(value) in reached
            node.meta["requires_grad"] = isinstance(value, Tensor) and value.requires_grad
    return storages


def _describe(node: fx.Node, value: Any) -> None:
    """Compute the meta "val" of a node with symbolic sizes, unless it describes `value` already."""
    if opens_region(node) or closes_region(node):  # running it once more would leave the region open
        node.meta["val"] = value
        return
    if "val" in node.meta and _describes(node.meta["val"], value):
        return
    known = {operand: operand.meta["val"] for operand in node.all_input_nodes}
    with torch.no_grad():
        described = run_node(node, known)
    node.meta["val"] = pytree.tree_map_only(Tensor, Tensor.detach, described)


def _describes(symbolic: Any, value: Any) -> bool:
    """Tell whether `symbolic` is `value` once its sizes are the example's."""
    if isinstance(value, tuple | list):
        return (
            isinstance(symbolic, tuple | list) and len(symbolic) == len(value) and all(map(_describes, symbolic, value))
        )
    if not isinstance(value, Tensor) or not isinstance(symbolic, Tensor):
        return type(_hint(symbolic)) is type(value) and _hint(symbolic) == value
    return (symbolic.dtype, symbolic.device, symbolic.layout) == (value.dtype, value.device, value.layout) and (
        _layout(symbolic) == _layout(value)
    )


def _layout(tensor: Tensor) -> tuple[list[Any], list[Any]]:
    return [_hint(size) for size in tensor.size()], [_hint(step) for step in tensor.stride()]


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def _at_example(value: Any) -> Any:
    """Return a fake tensor of the example's sizes for one of symbolic sizes."""
    if not isinstance(value, Tensor):
        return _hint(value)
    if not any(isinstance(size, torch.SymInt) for size in (*value.size(), *value.stride())):
        return value
    size, stride = _layout(value)
    fake = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return fake.requires_grad_(value.requires_grad)


def _edge_of(value: Tensor) -> tuple[Any, int]:
    if value.grad_fn is None and value._is_view():  # a fake view taken under no_grad: nothing flows back through it
        return None, 0
    edge = torch.autograd.graph.get_gradient_edge(value)
    return edge.node, edge.output_nr


def takes_gradient(value: Any) -> bool:
    """Tell whether backward can start at `value`: a view taken under no_grad says requires_grad, and none flows into it."""
    return _flowing_edge(value) is not None


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
