"""Compiled stages: the same masks, gradients within float rounding, one compilation for all batch sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import Chain
from torch import Tensor, nn
from zoo import Dropout

from stagekit.examples.gpt import Program
from stagekit.graph.buckets.rule import BucketRule
from stagekit.graph.capture.capture import capture


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
    compiled.forward((tokens[:2],))  # a second size compiles once more, for all others
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 6, 4):
            given = torch.randint(0, 256, (rows, 8))
            assert torch.allclose(compiled.forward((given,)), eager.forward((given,)), rtol=1e-5, atol=1e-5)


class EveryDraw(nn.Module):
    """Random operations that have no functional form here, between layers that a compiler would like to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.alpha_dropout(self.first(x), 0.3, True)
        x = x + torch.rand_like(x) + torch.randn(x.shape[-1]) + torch.normal(0.0, 1.0, (16,))
        x = x * torch.bernoulli(torch.full_like(x, 0.8)) + torch.randint(0, 3, (16,))
        x = F.rrelu(self.second(x), training=True)
        x = F.dropout1d(x, 0.4, True)[:, :, torch.randperm(16)]
        with torch.no_grad():
            noise = torch.randn_like(x).tanh() * 0.1
        x = torch.ops.aten.native_dropout(x + noise, 0.2, True)[0]
        x = x + torch.multinomial(torch.ones(16), 16)
        return F.dropout(self.lstm(x)[0], 0.1, True).relu()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_every_random_operation_draws_the_same_compiled_and_compiles_once(backend: str) -> None:
    x = torch.randn(4, 5, 16)
    captured = capture(EveryDraw, (x,), seed=1)
    torch._dynamo.reset()
    eager = Chain(captured.cut("layers", 1, measured=False))
    compiled = Chain(captured.cut(["second"], 2, measured=False), compile=backend)
    compiled.backward(compiled.forward((x,), seed_base=1).sum())
    for module in compiled.modules:
        module.zero_grad()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (2, 3 << 40):
            expected, got = eager.forward((x,), seed_base=seed), compiled.forward((x,), seed_base=seed)
            torch.testing.assert_close(got, expected)
            eager.backward(expected.sum())
            compiled.backward(got.sum())
    for name, gradient in eager.gradients().items():
        torch.testing.assert_close(compiled.gradients()[name], gradient, rtol=1e-4, atol=1e-4)


class FixedSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x.reshape(4, 16)), 0.5, True)


def test_seeds_do_not_compile_a_stage_of_fixed_sizes_again() -> None:
    x = torch.randn(4, 16)
    cut = capture(FixedSizes, (x,), seed=1).cut("layers", 1, measured=False)
    torch._dynamo.reset()
    eager, compiled = Chain(cut), Chain(cut, compile="aot_eager")
    compiled.forward((x,), seed_base=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2, 5):
            torch.testing.assert_close(compiled.forward((x,), seed_base=seed), eager.forward((x,), seed_base=seed))


class Attends(nn.Module):
    """Attention with dropout, called with `options` and a mask made in forward."""

    def __init__(self, options: dict[str, Any], autocast: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, 8)
        self.options, self.autocast = options, autocast

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[0], x.shape[1]
        options = dict(self.options)
        if kind := options.pop("mask", None):
            seen = torch.ones(length, length, dtype=torch.bool).tril(-1)
            options["attn_mask"] = (
                seen if kind == "bool" else torch.zeros(length, length).masked_fill(~seen, -torch.inf)
            )
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            q, k, v = self.first(x).view(rows, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **options)
        return self.last(h.transpose(1, 2).reshape(rows, length, 8).float())


ATTENTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "a row that sees nothing": ({"mask": "bool"}, False),
    "a row of minus infinity": ({"mask": "float"}, False),
    "a negative scale": ({"scale": -0.5}, False),
    "a scale of zero": ({"scale": 0.0}, False),
    "causal under autocast": ({"is_causal": True}, True),
    "a float mask under autocast": ({"mask": "float"}, True),
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_compiled_attention_with_dropout_is_the_eager_one(name: str, backend: str) -> None:
    options, autocast = ATTENTIONS[name]
    x = torch.randn(4, 5, 8)
    cut = capture(lambda: Attends(options, autocast), (x,), seed=1).cut("layers", 1, measured=False)
    torch._dynamo.reset()
    eager, compiled = Chain(cut), Chain(cut, compile=backend)
    expected, got = eager.forward((x,), seed_base=3), compiled.forward((x,), seed_base=3)
    assert bool(expected.isfinite().all())
    tolerance = 2e-2 if autocast else 1e-4  # a bfloat16 has 8 bits, and compilers round to it less often
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    eager.backward(expected.square().sum())
    compiled.backward(got.square().sum())
    for key, gradient in eager.gradients().items():
        torch.testing.assert_close(compiled.gradients()[key], gradient, rtol=tolerance, atol=tolerance)
