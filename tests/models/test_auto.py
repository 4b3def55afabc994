"""compile="auto" times eager and inductor when a stage is deployed, keeps one, and the stage computes as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import stagekit


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 8))


def test_auto_keeps_one_of_eager_and_inductor_and_trains_as_eager_does() -> None:
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    losses = []
    for compile in ("eager", "auto"):
        pipe = stagekit.pipeline(
            build, args=(x[:4],), loss_fn=mean_square, stages=1, chunks=2, split="parameters", compile=compile
        )
        run = pipe.deploy()
        assert run.compiled[0] in (("eager", "inductor") if compile == "auto" else ("eager",))
        losses.append(run.step(x, target=target).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
