"""Fake values for compiling a bucket: its inputs, and what it returns, without running the real model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_inputs(example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Return the fake mode of the examples (a new one if they are real) and the examples as fake values."""
    mode = detect_fake_mode(list(example_inputs)) or FakeTensorMode()
    fakes: list[Any] = []
    for value in example_inputs:
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            value = mode.from_tensor(value, static_shapes=True)
        fakes.append(value)
    return mode, fakes


def fake_outputs(bucket: fx.GraphModule, arguments: list[Any], mode: FakeTensorMode) -> Any:
    """Return what `bucket` gives for fake `arguments`, with autograd on; its real tensors stay untouched."""
    fake = _fake_copy(bucket, mode)
    with mode, torch.random.fork_rng(devices=[]):
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
