"""Compiled stages: the same masks, gradients within float rounding, one compilation for all batch sizes."""

from __future__ import annotations

import pytest
import torch
from reference import Chain
from zoo import Dropout

from stagekit.errors import UserError
from stagekit.examples.gpt import Program
from stagekit.graph.buckets import BucketRule
from stagekit.graph.capture import capture


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dropout_has_the_masks_of_the_eager_stages(backend: str) -> None:
    x = torch.randn(4, 5, 16)
    cut = capture(lambda: Dropout(layers=1), (x,), seed=1).cut("balanced", 1)
    eager, compiled = Chain(cut), Chain(cut, compile=backend)
    expected, got = eager.forward((x,), seed_base=3), compiled.forward((x,), seed_base=3)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    eager.backward(expected.sum())
    compiled.backward(got.sum())
    for name, value in eager.gradients().items():
        assert torch.allclose(compiled.gradients()[name], value, rtol=1e-4, atol=1e-4), name
    assert not torch.allclose(compiled.forward((x,), seed_base=4), expected)


def test_buckets_of_a_compiled_stage_serve_every_batch_size() -> None:
    program = Program(layers=1, width=32, heads=2, sequence=8, batch=4)
    (tokens,), _ = program.example_inputs()
    cut = capture(program.build_model, (tokens,), seed=1).cut("balanced", 1, buckets=BucketRule(20_000))
    assert all(len(stage.buckets) > 1 for stage in cut.spec.stages)
    torch._dynamo.reset()
    eager, compiled = Chain(cut), Chain(cut, compile="aot_eager")
    compiled.forward((tokens,))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 6):
            given = torch.randint(0, 256, (rows, 8))
            assert torch.allclose(compiled.forward((given,)), eager.forward((given,)), rtol=1e-5, atol=1e-5)


def test_randomness_that_cannot_follow_the_cut_when_compiled_is_refused() -> None:
    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + torch.randn_like(x)

    cut = capture(Noise, (torch.randn(3, 4),)).cut("balanced", 1)
    with pytest.raises(UserError, match=r'draws random numbers in randn_like.*use compile="eager"'):
        cut.stage_module(0, compile="aot_eager")
