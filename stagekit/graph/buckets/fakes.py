"""Fake values for compiling a bucket: its inputs, and what it returns, without running the real model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def as_traced(placeholder: fx.Node, example: Any) -> Any:
    """Return the fake value that dynamo traced with, where it passes a real one: only the fake has symbolic sizes, and
    knows the number that `.item()` gives of a float that became an input.
    """
    traced = placeholder.meta.get("example_value")
    return traced if isinstance(example, Tensor) and isinstance(traced, FakeTensor) else example


def fake_inputs(example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Return one fake mode for the examples and the examples as its fake values.

    Fakes of several modes (a capture's weights live in another mode than its inputs) move into the one with symbolic
    sizes, static ones keep their sizes; real tensors become fakes.
    """
    fakes = [value for value in example_inputs if isinstance(value, FakeTensor)]
    leading = next((fake for fake in fakes if _is_symbolic(fake)), fakes[0] if fakes else None)
    mode = leading.fake_mode if leading is not None else FakeTensorMode()
    return mode, [_move(value, mode) if isinstance(value, Tensor) else value for value in example_inputs]


def _is_symbolic(fake: FakeTensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in fake.size())


def _move(value: Tensor, mode: FakeTensorMode) -> Tensor:
    if not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    if value.fake_mode is mode:
        return value
    with mode:
        fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake


def fake_outputs(bucket: fx.GraphModule, arguments: list[Any], mode: FakeTensorMode) -> Any:
    """Return what `bucket` gives for fake `arguments`, with autograd on; its real tensors stay untouched."""
    fake = _fake_copy(bucket, mode)
    with mode, enable_python_dispatcher(), torch.random.fork_rng(devices=[]):
        return fx.Interpreter(fake).run(*arguments)


def _fake_copy(bucket: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    memo: dict[int, Any] = {}
    for tensor in _tensors(bucket):
        if not isinstance(tensor, FakeTensor):
            memo[id(tensor)] = mode.from_tensor(tensor, static_shapes=True)
        else:
            memo[id(tensor)] = tensor
    return copy.deepcopy(bucket, memo)


def _tensors(module: nn.Module) -> list[Tensor]:
    found = [*module.parameters(), *module.buffers()]
    for child in module.modules():
        found += [value for value in vars(child).values() if isinstance(value, Tensor)]
    return found


def fake_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """Return what each node of `gm` gives on fake inputs; its real tensors stay untouched."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    mode, fakes = fake_inputs([as_traced(*pair) for pair in zip(placeholders, example_inputs, strict=True)])
    fake = _fake_copy(gm, mode)
    interpreter = fx.Interpreter(fake, garbage_collect_values=False)
    with mode, enable_python_dispatcher(), torch.random.fork_rng(devices=[]):
        interpreter.run(*fakes)
    return {node: interpreter.env.get(copied) for node, copied in zip(gm.graph.nodes, fake.graph.nodes, strict=True)}
