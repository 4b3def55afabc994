"""Whether an operator that is not torch's own draws random numbers: a tag says so, or its implementation is watched.

Authors of operators seldom know the tag. An operator in Python runs once on fake tensors of the example's sizes, on every
machine alike; one that can't be watched (it is in C++, it looks at values) counts as drawing, which costs a seed per call
and, compiled, a graph break. Asked by graph.passes.aliasing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_OWN = ("aten", "prims", "prim", "stagekit", "profiler", "inductor", "quantized", "mkldnn", "torchvision")
_KNOWN = "draws"  # the node's meta under which an answer is kept


def is_foreign(target: torch._ops.OpOverload) -> bool:
    """Tell whether the operator is none of torch's or torchvision's, whose tags are complete."""
    return target.namespace not in _OWN


def may_draw(node: fx.Node) -> bool:
    """Tell whether a foreign operator may draw from a default generator when this node calls it."""
    if _KNOWN in node.meta:
        return bool(node.meta[_KNOWN])
    found = _watched(node)
    if all("val" in other.meta for other in node.all_input_nodes):
        node.meta[_KNOWN] = found
    return found


class _Watch(TorchDispatchMode):
    """Notes operations that draw, or that may."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags or is_foreign(func)
        return func(*args, **(kwargs or {}))


def _watched(node: fx.Node) -> bool:
    implementation = _implementation(node)
    if implementation is None:
        return True
    watch = _Watch()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            args, kwargs = pytree.tree_map(lambda value: _example(value, mode), (node.args, node.kwargs))
            with torch.no_grad(), watch:
                implementation(*args, **kwargs)
    except Exception:
        return True  # it looks at values, or calls what fake tensors can't
    return watch.draws


def _implementation(node: fx.Node) -> Callable[..., Any] | None:
    """Return the Python function that runs for the node's device, if there is one."""
    definition = OPDEFS.get(str(node.target._schema.name))  # type: ignore[union-attr]
    if definition is None:
        return None
    values = (other.meta.get("val") for other in node.all_input_nodes)
    device = next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
    kernels = definition._backend_fns
    found: Callable[..., Any] | None = kernels.get(device) or kernels.get(None)
    return found


def _example(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, fx.Node):
        return value
    held = value.meta["val"]
    if isinstance(held, Tensor):
        shape, stride = ([optimization_hint(size) for size in sizes] for sizes in (held.size(), held.stride()))
        with mode:
            return torch.empty_strided(shape, stride, dtype=held.dtype, device=held.device)
    return optimization_hint(held) if isinstance(held, torch.SymInt) else held
