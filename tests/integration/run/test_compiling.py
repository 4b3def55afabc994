"""Stages are compiled when deployed: what a default means, that warm-up leaves no trace, what an error names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import stagekit
from stagekit.api import Pipeline
from stagekit.errors import UserError
from stagekit.graph.compile.compilers import resolve


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.dropout(self.norm(self.first(x)), 0.5, True))  # type: ignore[no-any-return]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def pipe(compile: str, *, recompute: bool = False) -> Pipeline:
    return stagekit.pipeline(
        Model,
        args=(torch.randn(4, 4),),
        loss_fn=mean_square,
        stages=1,
        chunks=2,
        split="parameters",
        compile=compile,
        recompute=recompute,
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_warming_up_leaves_no_trace(recompute: bool) -> None:
    eager, compiled = pipe("eager"), pipe("aot_eager", recompute=recompute)
    state = torch.get_rng_state()
    plain, run = eager.deploy(), compiled.deploy()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in run.parameters())
    assert run.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in run.state_dict().items())
    assert run.compiled == {0: "aot_eager"}
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    assert run.step(x, target=target).loss == pytest.approx(plain.step(x, target=target).loss, rel=1e-5)


def test_auto_repeats_what_an_earlier_run_chose() -> None:
    run = pipe("auto").deploy(compiled={0: "aot_eager"})
    assert run.compiled == {0: "aot_eager"}


def test_the_default_is_eager_on_the_cpu_and_inductor_on_cuda() -> None:
    assert resolve("default", "cpu") == "eager"
    assert resolve("default", "cuda:1") == "inductor"
    assert pipe("default").plan.compile == "eager"


def test_an_unknown_compiler_is_refused_when_the_pipeline_is_made() -> None:
    with pytest.raises(
        UserError, match=r"compile='nonsense' is no backend of torch.compile here; there are default, auto"
    ):
        pipe("nonsense")


def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
    raise RuntimeError("this compiler knows nothing")


def test_a_stage_that_does_not_compile_is_named() -> None:
    torch._dynamo.reset()
    torch._dynamo.register_backend(broken, name="stagekit_broken")
    with pytest.raises(
        UserError, match=r"stage 0 \(first\) can't be compiled with 'stagekit_broken': .*compile: eager"
    ):
        pipe("stagekit_broken").deploy()
