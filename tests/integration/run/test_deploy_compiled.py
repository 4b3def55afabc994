"""Replicas of a compiled stage use one backend, also where they would choose different ones or one lacks a compiler."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stagekit
from stagekit.graph.compile.module import StageModule
from stagekit.testing import spawn


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def deploy(rank: int, compile: str) -> dict[str, Any]:
    pipe = stagekit.pipeline(
        build, args=(torch.ones(2, 4),), loss_fn=mean_square, stages=1, chunks=2, replicas=2, split="parameters",
        compile=compile,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = pipe.deploy()
    x, target = torch.ones(4, 4) * (rank + 1), torch.zeros(4, 4)
    loss = run.step(x, target=target).loss
    return {"compiled": run.compiled, "loss": loss, "said": [str(w.message) for w in seen], "rank": dist.get_rank()}


class Lacking(StageModule):
    def backend_problem(self, backend: str) -> str | None:
        return "no C++ compiler was found here"


def lacks_a_compiler_on_rank_1(rank: int) -> dict[str, Any]:
    if rank == 1:
        StageModule.backend_problem = Lacking.backend_problem  # type: ignore[method-assign]
    return deploy(rank, "aot_eager")


def test_replicas_warm_up_and_agree() -> None:
    results = spawn(deploy, 2, "aot_eager", timeout_s=120.0)
    assert [result["compiled"] for result in results] == [{0: "aot_eager"}] * 2
    assert results[0]["loss"] == results[1]["loss"]


def test_where_one_replica_lacks_a_compiler_none_compiles() -> None:
    results = spawn(lacks_a_compiler_on_rank_1, 2, timeout_s=120.0)
    assert [result["compiled"] for result in results] == [{0: "eager"}] * 2
    assert any("1 other replica(s) of these stages can't" in text for text in results[0]["said"])
    assert any("no C++ compiler" in text for text in results[1]["said"])
