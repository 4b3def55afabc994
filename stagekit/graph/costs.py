"""What each node of a capture costs: measured by running it alone on operands made up from their fake shapes.

One node's operands are in memory at a time, never the model. Equal calls (same operator, shapes and constants) are
timed once. Where the target device is absent, a node costs its bytes over the memory's bandwidth. Called by graph.cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from stagekit.graph.propagate import entered

if TYPE_CHECKING:
    from stagekit.graph.capture import Captured

MEMORY_BYTES_PER_S = 1e10  # order of one core's copy speed; used only for what can't be timed
LINK_BYTES_PER_S = 2e9  # gloo over loopback at 1 MiB gives 3-6 GB/s; a copy on each side halves it
LINK_S_PER_MESSAGE = 5e-5  # a gloo hop takes 38-71 µs
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one node at the example's sizes."""

    forward_s: float
    backward_s: float


def measure(captured: Captured, nodes: Sequence[fx.Node]) -> dict[str, Cost]:
    """Return the cost per node name; generators and the model's own tensors stay untouched."""
    present = captured.device == "cpu" or torch.get_device_module(captured.device).is_available()
    known: dict[str, Cost] = {}
    costs: dict[str, Cost] = {}
    with torch.random.fork_rng(devices=[]):
        for node in nodes:
            signature = _signature(captured, node)
            if signature not in known:
                known[signature] = (_timed(captured, node) if present else None) or _by_bytes(captured, node)
            costs[node.name] = known[signature]
    return costs


def _signature(captured: Captured, node: fx.Node) -> str:
    def describe(n: fx.Node) -> Any:
        value = n.meta["val"]
        if isinstance(value, Tensor):
            return (*captured.symbols.example_shape(value), str(value.dtype), n.meta["requires_grad"])
        return str(captured.symbols.example(value))

    shown = [describe(n) for n in node.all_input_nodes]
    constants = fx.map_arg((node.args, node.kwargs), lambda n: "·")
    return f"{node.target} {constants} {shown} {node.meta.get('context')}"


def tensor_bytes(captured: Captured, value: Any) -> int:
    """Return the bytes of the fake tensors in `value` at the example's sizes."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(_numel(captured.symbols.example_shape(leaf)[0]) * leaf.element_size() for leaf in leaves)


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _by_bytes(captured: Captured, node: fx.Node) -> Cost:
    moved = sum(tensor_bytes(captured, n.meta["val"]) for n in (node, *node.all_input_nodes))
    seconds = moved / MEMORY_BYTES_PER_S
    return Cost(seconds, 2 * seconds if node.meta["requires_grad"] else 0.0)


def _timed(captured: Captured, node: fx.Node) -> Cost | None:
    """Return the measured cost, None if the node can't run on made-up operands."""

    def operand(n: fx.Node) -> Any:
        value = n.meta["val"]
        if not isinstance(value, Tensor):
            return pytree.tree_map_only(Tensor, lambda t: made_up(captured, t, False), captured.symbols.example(value))
        return made_up(captured, value, n.meta["requires_grad"])

    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        with entered(node.meta.get("context", ())):
            forward_s = _fastest(captured.device, lambda: node.target(*args, **kwargs))  # type: ignore[operator]
            outputs = pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
        roots = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        if not roots or not leaves:
            return Cost(forward_s, 0.0)
        cotangents = [torch.ones_like(root) for root in roots]
        backward_s = _fastest(
            captured.device,
            lambda: torch.autograd.grad(roots, leaves, cotangents, retain_graph=True, allow_unused=True),
        )
        return Cost(forward_s, backward_s)
    except Exception:  # made-up values an operator refuses: its cost is estimated instead
        return None


def made_up(captured: Captured, fake: Tensor, requires_grad: bool) -> Tensor:
    """Return a real tensor laid out like `fake` at the example's sizes: small floats, zeros for anything else."""
    shape, stride = captured.symbols.example_shape(fake)
    tensor = torch.empty_strided(shape, stride, dtype=fake.dtype, device=captured.device)
    if not fake.dtype.is_floating_point:
        return tensor.zero_()
    if 0 not in stride:
        tensor.normal_(0.0, 0.02)
    else:
        tensor = (
            tensor.fill_(0.02)
            if tensor.numel() == 0
            else torch.full((), 0.02, dtype=fake.dtype, device=captured.device).expand(shape)
        )
    return tensor.detach().requires_grad_(requires_grad)


def _fastest(device: str, run: Callable[[], Any]) -> float:
    synchronize = torch.get_device_module(device).synchronize
    run()
    best = float("inf")
    for _ in range(_REPEATS):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        best = min(best, time.perf_counter() - started)
    return best
