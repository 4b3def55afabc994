"""The graph hash: equal wherever the same versions capture the same model, different where anything of it differs.

A worker compares its own with that of the published plan before it joins. Nothing that depends on the process (addresses,
order of sets, PYTHONHASHSEED) enters. Called by graph.capture.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from stagekit.graph.capture.functions import traits_of
from stagekit.graph.values.build import named_tensors


def graph_hash(graph: fx.Graph, facts: Any, tensors: Mapping[str, Tensor], sources: Iterable[str]) -> str:
    """Return 32 hex digits for a captured graph.

    `facts`: whatever else the model is (inputs, symbols, device type, mode, ties, output), with a repr that is equal in
    every process. `tensors`: parameters, buffers and constants; the values of those that are real count. `sources`: the
    modules that the model's classes are from; the versions of their packages count.
    """
    digest = hashlib.sha256()
    digest.update(repr((torch.__version__, sys.version_info[:2], _versions(sources), facts)).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name}|{_described(tensor)}\n".encode())
    for node in graph.nodes:
        context = node.meta.get("context")
        digest.update(f"{node.name}|{_target(node)}|{node.args}|{node.kwargs}|{context}\n".encode())
    return digest.hexdigest()[:32]


def attribute_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the real tensors that the module holds as plain attributes: forward reads their values as constants."""
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {
        name: tensor
        for name, tensor in named_tensors(module)
        if name not in known
        and not isinstance(tensor, FakeTensor)
        and tensor.device.type != "meta"
        and tensor.layout == torch.strided
    }


def _versions(sources: Iterable[str]) -> list[tuple[str, str]]:
    packages = {source.partition(".")[0] for source in sources} - {"torch", "stagekit"}
    return sorted((name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in packages)


def _described(tensor: Tensor) -> tuple[Any, ...]:
    described = (type(tensor).__name__ == "Parameter", str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
    if isinstance(tensor, FakeTensor):
        return described
    plain = tensor.detach().cpu().contiguous()
    return (*described, hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest())


def _target(node: fx.Node) -> str:
    traits = traits_of(node.target)
    if traits is not None:
        return f"{node.target.__module__}.{node.target.__qualname__} {traits.digest}"  # type: ignore[union-attr]
    if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
        return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
    return str(node.target)
