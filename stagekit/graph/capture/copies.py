"""Copies of a user's module: a real one that a check may use up, and one of fake tensors that export runs.

What can't be copied and holds no tensors (locks, loggers, open files) is shared by the copies. Called by graph.capture.export
and graph.capture.selfcheck; the user's module is never touched.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stagekit.errors import CaptureError
from stagekit.graph.values.build import named_tensors


def in_mode(module: nn.Module, training: bool | None) -> nn.Module:
    """Return `module` after train(training); None leaves every submodule's own flag as it is."""
    return module if training is None else module.train(training)


def skeleton_of(module: nn.Module, mode: FakeTensorMode, device: str, training: bool | None = None) -> nn.Module:
    """Return a copy of `module` whose parameters, buffers and tensor attributes are fake tensors on `device`."""
    memo: dict[int, Any] = {}
    for _, tensor in named_tensors(module):
        if id(tensor) in memo:
            continue
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return in_mode(_copied(module, memo), training)


def twin_of(module: nn.Module) -> nn.Module:
    """Return a copy of `module` with values of its own, without gradients."""
    memo: dict[int, Any] = {}
    for _, tensor in named_tensors(module):
        if not isinstance(tensor, nn.Parameter) and tensor.grad_fn is not None:  # weight_norm keeps what it computed
            memo[id(tensor)] = tensor.detach().clone()
    twin = _copied(module, memo)
    twin.zero_grad(set_to_none=True)
    return twin


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception as error:
        shared = _uncopyable(module, memo)
        if not shared:
            raise _refusal(module, error) from error
    try:
        return copy.deepcopy(module, memo | {id(value): value for value in shared})
    except Exception as error:
        raise _refusal(module, error) from error


def _refusal(module: nn.Module, error: Exception) -> CaptureError:
    return CaptureError(
        f"{type(module).__name__} can't be copied ({type(error).__name__}: {error}), and nothing of yours may change "
        "while it is captured; let copy.deepcopy(model) work, or pass a function that builds the model"
    )


def _uncopyable(module: nn.Module, memo: dict[int, Any]) -> list[Any]:
    """Return the attribute values of all submodules that can't be copied and hold no tensors."""
    found = []
    for child in module.modules():
        for name, value in vars(child).items():
            if name in ("_parameters", "_buffers", "_modules") or isinstance(value, Tensor):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                found.append(value)
    return found
