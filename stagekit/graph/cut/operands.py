"""Real operands made up from a node's fake ones, so that it can run alone. Called by graph.cut.costs.

Floats are small, integers zero (a legal index anywhere) except where the values decide how much work there is: rows of
an embedding, offsets of grouped matrices. Where an operator refuses zeros, ones are tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from stagekit.graph.passes.aliasing import named_arguments, schema_name

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured


def operands(captured: Captured, node: fx.Node, *, integers: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for `node.target`: tensors require grad as in the capture, sizes are the example's."""
    values = dict(_special(captured, node))
    for n in node.all_input_nodes:
        if n not in values:
            wants = n.meta["requires_grad"]
            values[n] = pytree.tree_map(
                lambda leaf, wants=wants: (
                    made_up(captured, leaf, wants, integers=integers)
                    if isinstance(leaf, Tensor)
                    else captured.symbols.example(leaf)
                ),
                n.meta["val"],
            )
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return arguments


def made_up(captured: Captured, fake: Tensor, requires_grad: bool, *, integers: int = 0) -> Tensor:
    """Return a real tensor laid out like `fake` at the example's sizes."""
    shape, stride = captured.symbols.example_shape(fake)
    if 0 in stride and 0 not in shape:  # expanded: one element seen many times
        base = torch.empty_strided(
            [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)],
            stride,
            dtype=fake.dtype,
            device=captured.device,
        )
        tensor = _filled(base, integers).expand(shape)
    else:
        tensor = _filled(torch.empty_strided(shape, stride, dtype=fake.dtype, device=captured.device), integers)
    return tensor.detach().requires_grad_(requires_grad)


def _filled(tensor: Tensor, integers: int) -> Tensor:
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        return tensor.normal_(0.0, 0.02)
    return tensor.fill_(0.02 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else integers)


def _special(captured: Captured, node: fx.Node) -> Mapping[fx.Node, Any]:
    """Return made-up integers that must not all be zero for the usual amount of work."""
    name = schema_name(node).removeprefix("aten::")
    given = named_arguments(node) if name else {}
    if name == "embedding":
        indices, weight = given["indices"], given["weight"]
        rows = captured.symbols.example(weight.meta["val"].size(0))
        return {indices: _like(captured, indices, lambda shape: torch.randint(0, max(rows, 1), shape))}
    offsets = given.get("offs")
    if isinstance(offsets, fx.Node):  # grouped_mm: where each group ends
        rows = captured.symbols.example(node.args[0].meta["val"].size(-2))  # type: ignore[union-attr]
        return {offsets: _like(captured, offsets, lambda shape: (torch.arange(1, shape[0] + 1) * rows) // shape[0])}
    return {}


def _like(captured: Captured, node: fx.Node, make: Any) -> Tensor:
    fake = node.meta["val"]
    shape, _ = captured.symbols.example_shape(fake)
    values: Tensor = make(shape)
    return values.to(device=captured.device, dtype=fake.dtype)
