"""Under which autograd and autocast mode each node ran while the model was exported, noted on the node itself.

Export rebuilds no_grad and autocast regions from the calls that switch modes, and loses regions that lie in each other or
were entered by a checkpoint. graph.capture.export enters `NotedModes`; graph.passes.normalise asks `corrected` for the
context of every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import TracerBase

Context = tuple[tuple[Any, ...], ...]  # of ("grad", enabled) and ("autocast", device, dtype, enabled, cache)
Modes = tuple[bool, tuple[tuple[str, torch.dtype], ...]]  # records gradients; dtype per device type with autocast
_DEVICES = ("cpu", "cuda")


class NotedModes:
    """While entered, each node that a tracer makes remembers the modes of that moment in its meta data."""

    def __init__(self) -> None:
        self._ambient = _autocast()
        self._original: Any = TracerBase.create_node

    def __enter__(self) -> None:
        original, ambient = self._original, self._ambient

        def create_node(tracer: TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = original(tracer, *args, **kwargs)
            found = _autocast()
            node.meta["modes"] = (torch.is_grad_enabled(), () if found == ambient else found)
            return node

        TracerBase.create_node = create_node  # type: ignore[assignment, method-assign]

    def __exit__(self, *_: object) -> None:
        TracerBase.create_node = self._original  # type: ignore[method-assign]


def corrected(context: Context, meta: Mapping[str, Any]) -> Context:
    """Return the regions of an exported node, or the plainest ones that give the noted modes if those differ."""
    noted: Modes | None = meta.get("modes")
    if noted is None or noted == _modes_in(context):
        return context
    records, autocast = noted
    regions: Context = tuple(("autocast", device, dtype, True, False) for device, dtype in autocast)
    return regions if records else (*regions, ("grad", False))


def _modes_in(context: Context) -> Modes:
    records, autocast = True, dict[str, torch.dtype]()
    for kind, first, *rest in context:
        if kind == "grad":
            records = first
        elif rest[1]:
            autocast[first] = rest[0]
        else:
            autocast.pop(first, None)
    return records, tuple(sorted(autocast.items()))


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))
