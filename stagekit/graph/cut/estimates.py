"""What a node costs when it isn't timed: counted FLOPs at a nominal rate, or the bytes that it moves. For graph.cut.costs.

Counters know matrix products, convolutions and attention; everything else costs its bytes over the memory's bandwidth.
Only ratios matter for a cut, and the order of magnitude against a transfer.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from stagekit.graph.passes.propagate import entered

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured

# Orders of magnitude of one CPU core and of one accelerator: fp32 FLOP/s, bytes/s.
_FLOPS_PER_S = {"cpu": 5e10}
_BYTES_PER_S = {"cpu": 1e10}
_ACCELERATOR_FLOPS_PER_S, _ACCELERATOR_BYTES_PER_S = 5e13, 1e12

Seconds = tuple[float, float]  # forward, backward


def by_bytes(captured: Captured, node: fx.Node) -> Seconds:
    """Return the time to read a node's operands and write its result; twice that backward."""
    moved = sum(tensor_bytes(captured, n.meta["val"]) for n in (node, *node.all_input_nodes))
    seconds = moved / _BYTES_PER_S.get(captured.device, _ACCELERATOR_BYTES_PER_S)
    return seconds, 2 * seconds if node.meta["requires_grad"] else 0.0


def by_flops(captured: Captured, node: fx.Node) -> Seconds:
    """Return the time of a node's floating point operations, by its bytes where a counter knows none."""
    forward, backward = _flops(captured, node)
    if not forward:
        return by_bytes(captured, node)
    rate = _FLOPS_PER_S.get(captured.device, _ACCELERATOR_FLOPS_PER_S)
    return forward / rate, backward / rate


def _flops(captured: Captured, node: fx.Node) -> tuple[float, float]:
    """Run a node and its backward on fake tensors of the example's sizes, under a counter."""
    mode = FakeTensorMode()

    def fake(n: fx.Node) -> Any:
        return pytree.tree_map(lambda leaf: _static(captured, leaf, n.meta["requires_grad"], mode), n.meta["val"])

    with contextlib.suppress(Exception), mode, enable_python_dispatcher(), torch.enable_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), fake)
        with entered(node.meta.get("context", ())), FlopCounterMode(display=False) as counter:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        forward = float(counter.get_total_flops())
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        roots = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        if not roots or not leaves:
            return forward, 0.0
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
        return forward, float(counter.get_total_flops())
    return 0.0, 0.0


def _static(captured: Captured, leaf: Any, requires_grad: bool, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, Tensor):
        return captured.symbols.example(leaf)
    shape, stride = captured.symbols.example_shape(leaf)
    with mode:
        made = torch.empty_strided(shape, stride, dtype=leaf.dtype, device=captured.device)
    return made.requires_grad_(requires_grad)


def tensor_bytes(captured: Captured, value: Any) -> int:
    """Return the bytes of the fake tensors in `value` at the example's sizes."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(_numel(captured.symbols.example_shape(leaf)[0]) * leaf.element_size() for leaf in leaves)


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
