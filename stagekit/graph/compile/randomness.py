"""Random operations draw from (seed base, number of the operation), so dropout does not depend on the cut.

The runtime gives each chunk a seed base; before the operation numbered k in the capture the stage's graph holds
`reseed(base, k, device)`. In compiled stages dropout is `keep_mask` instead, a functional operator with the same
masks; other random operations stay as they are. Used by graph.cut.stages and graph.compile.module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

_MASK = (1 << 64) - 1


def mix(base: int, k: int) -> int:
    """Return a 32-bit seed for operation `k`: splitmix64 (Steele et al. 2014), folded.

    Folded because the CPU generator uses only the low 32 bits of a seed.
    """
    z = (base + (k + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return (z ^ (z >> 32)) & 0xFFFFFFFF


def reseed(base: int | Tensor, k: int, device: str) -> None:
    """Seed the device's default generator for the operation numbered `k`."""
    if isinstance(base, FakeTensor):
        return  # shapes are propagated, nothing is drawn
    if device == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(mix(int(base), k))
    else:
        torch.default_generator.manual_seed(mix(int(base), k))


fx.node.has_side_effect(reseed)


@torch.library.custom_op("stagekit::keep_mask", mutates_args=())
def keep_mask(x: Tensor, p: float, base: Tensor, k: int) -> Tensor:
    """Return dropout's factor for `x`: 0 where dropped, 1 / (1 - p) where kept.

    `base` [] int64 on the CPU: an int would be compiled in, and every chunk would compile again.
    """
    generator = torch.Generator(x.device).manual_seed(mix(int(base), k))
    if p >= 1.0:
        return torch.zeros_like(x)
    return torch.empty_like(x).bernoulli_(1 - p, generator=generator).div_(1 - p)


@keep_mask.register_fake
def _(x: Tensor, p: float, base: Tensor, k: int) -> Tensor:
    return torch.empty_like(x)


def functional_dropout(graph: fx.Graph, base: fx.Node) -> set[fx.Node]:
    """Replace reseeded dropout by `keep_mask` for a compiled stage; return the random nodes that remain.

    Attention with dropout becomes explicit matmuls, softmax and dropout. What remains draws from the default generator,
    which no compiler follows: it must run eagerly, right after its reseed.
    """
    remaining = set()
    for node in list(graph.nodes):
        if node.target is not reseed:
            continue
        k, op = node.args[1], node.next
        name = str(op.target)
        if name == "aten.dropout.default":
            x, p = op.args[0], op.args[1]
            with graph.inserting_before(op):
                shape = graph.call_function(torch.ops.aten.detach.default, (x,))  # the mask has no gradient
                mask = graph.call_function(torch.ops.stagekit.keep_mask.default, (shape, p, base, k))
                result = graph.call_function(torch.ops.aten.mul.Tensor, (x, mask))
        elif name == "aten.scaled_dot_product_attention.default":
            with graph.inserting_before(op):
                result = graph.call_function(dropout_attention, (*_attention_args(op), base, k))
        else:
            remaining.add(op)
            continue
        result.meta = dict(op.meta)
        op.replace_all_uses_with(result)
        graph.erase_node(op)
        graph.erase_node(node)
    return remaining


def _attention_args(op: fx.Node) -> tuple[Any, ...]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, op.args, strict=False)) | dict(op.kwargs)
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    scale, enable_gqa = given.get("scale"), given.get("enable_gqa", False)
    return (*(given.get(name, defaults.get(name)) for name in names), scale, enable_gqa)


def dropout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    base: Tensor,
    k: int,
) -> Tensor:
    """Attention written out, as torch's math backend does it, with dropout by `keep_mask`.

    Half types are computed in float32, and a row that sees nothing gives 0. Autocast reaches the operands only.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (_as_autocast(t, device) for t in (query, key, value))
        mask = mask if mask is None else _as_autocast(mask, device)
    given = query.dtype
    with torch.autocast(device, enabled=False):
        query, key, value = (_widened(t) for t in (query, key, value))
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        factor = query.size(-1) ** -0.5 if scale is None else scale
        root = abs(factor) ** 0.5
        scores = (query * (root if factor >= 0 else -root)) @ (key * root).transpose(-2, -1)
        if is_causal:
            causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~causal, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        weights = torch.ops.aten._safe_softmax.default(scores, -1)
        kept = torch.ops.stagekit.keep_mask(weights.detach(), p, base, k)
        return ((weights * kept) @ value).to(given)  # type: ignore[no-any-return]


def _as_autocast(tensor: Tensor, device: str) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device)) if eligible else tensor


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
