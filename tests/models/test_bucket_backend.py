"""The DDP split as a torch.compile backend on real models: several buckets, the plain model's outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import Case

from stagekit.examples import digits, gpt2
from stagekit.graph.bucket import backend


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config)


def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))


CASES: list[Callable[[], Case]] = [
    lambda: Case("gpt2", gpt2.Program(layers=1, width=32, sequence=8).build_model, (), {"input_ids": tokens()}),
    lambda: Case("bert", bert, (), {"input_ids": tokens()}),
    lambda: Case("convnet", digits.Program(width=4).build_model, (torch.randn(4, 1, 8, 8),)),
]


def first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", CASES, ids=["gpt2", "bert", "convnet"])
def test_a_real_model_splits_into_buckets_and_trains_as_before(make: Callable[[], Case]) -> None:
    case = make()
    torch.manual_seed(0)
    model = case.build()
    plain = copy.deepcopy(model)
    counted: list[int] = []

    def inner(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        counted.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    run = torch.compile(model, backend=backend(cap_bytes=8 << 10, first_cap_bytes=1 << 10, inner=inner))
    got, expected = (first_tensor(m(*case.args, **case.kwargs)) for m in (run, plain))
    assert len(counted) >= 2
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got.square().sum().backward()
    expected.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)
    for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, None])
def test_buckets_of_a_compiled_model_serve_batches_of_other_sizes(inner: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plain = copy.deepcopy(module)
    run = torch.compile(module, backend=backend(cap_bytes=300, inner=inner), dynamic=dynamic)
    for rows in (4, 8, 12, 5):
        x = torch.randn(rows, 8)
        for each, call in ((module, run), (plain, plain)):
            each.zero_grad()
            call(x).sum().backward()
        for (name, got), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(got.grad, expected.grad, rtol=1e-4, atol=1e-5), (name, rows)
