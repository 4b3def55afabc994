"""Targets that are built of several tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stagekit
from stagekit.errors import UserError


def loss(output: Tensor, target: Any) -> Tensor:
    return ((output - target["near"]) ** 2).mean() + 3.0 * (output - target["far"]).abs().mean()


def test_a_targets_keys_may_come_in_any_order_but_not_be_others() -> None:
    torch.manual_seed(0)
    run = stagekit.pipeline(nn.Linear(4, 2), args=(torch.zeros(2, 4),), loss_fn=loss, stages=1, chunks=2).deploy()
    x, near, far = torch.randn(4, 4), torch.randn(4, 2), torch.randn(4, 2)
    first = run.step(x, target={"near": near, "far": far}).loss
    assert run.step(x, target={"far": far, "near": near}).loss == first
    for other in ({"near": near, "away": far}, [near, far], {"near": near}):
        with pytest.raises(UserError, match="the target is built otherwise than that of the first step"):
            run.step(x, target=other)
    assert run.step(x, target={"near": near, "far": far}).loss == first
