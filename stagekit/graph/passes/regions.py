"""no_grad and autocast regions of the model, emitted again in every stage that holds a part of them.

`move` writes the nodes that leave one context and enter another. A region restores what it found, so a stage also
runs under torch.no_grad(). Used by graph.cut.stages; graph.bucket keeps a region within one bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stagekit.graph.capture.modes import Context


def enter_grad(enabled: bool) -> bool:
    """Switch autograd recording; return whether it was on."""
    previous = torch.is_grad_enabled()
    torch._C._set_grad_enabled(enabled)
    return previous


def exit_grad(previous: bool) -> None:
    """Undo `enter_grad`."""
    torch._C._set_grad_enabled(previous)


_ENTER = (enter_grad, torch.amp.autocast_mode._enter_autocast)
_EXIT = (exit_grad, torch.amp.autocast_mode._exit_autocast)
for _function in (*_ENTER, *_EXIT):
    fx.node.has_side_effect(_function)


def opens_region(node: fx.Node) -> bool:
    """Tell whether the node enters a region."""
    return node.target in _ENTER or (node.target is torch._C._set_grad_enabled and not node.args[0])


def closes_region(node: fx.Node) -> bool:
    """Tell whether the node leaves a region."""
    return node.target in _EXIT or (node.target is torch._C._set_grad_enabled and bool(node.args[0]))


def move(graph: fx.Graph, open_regions: list[tuple[tuple[Any, ...], fx.Node]], context: Context) -> None:
    """Append the nodes that lead from `open_regions` to `context`; `open_regions` is updated."""
    common = 0
    while common < min(len(open_regions), len(context)) and open_regions[common][0] == context[common]:
        common += 1
    while len(open_regions) > common:
        region, token = open_regions.pop()
        graph.call_function(_EXIT[region[0] == "autocast"], (token,))
    for region in context[common:]:
        token = graph.call_function(_ENTER[region[0] == "autocast"], tuple(region[1:]))
        open_regions.append((region, token))
