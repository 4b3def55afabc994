"""no_grad, inference_mode and autocast, one in the other, inside checkpoints and around in-place writes, keep gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Chain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagekit.graph.capture.capture import capture


class Model(nn.Module):
    """Three layers, and the function that a test gives as its forward."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def no_grad_in_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = m.a(x)
        with torch.no_grad():
            fixed = m.b(h).float()
        kept = m.b(h)
    return m.c(kept.float() + fixed)  # type: ignore[no-any-return]


@torch.autocast("cpu", torch.bfloat16)
def one_softmax_without_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        weight = h.softmax(-1)
    return m.c(m.b(h) * weight)  # type: ignore[no-any-return]


def grad_in_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
        with torch.enable_grad():
            h = m.b(h)
    return m.c(h)  # type: ignore[no-any-return]


def nested_checkpoints(m: Any, x: Tensor) -> Tensor:
    inner = lambda t: checkpoint(m.b, t, use_reentrant=False).tanh()  # type: ignore[union-attr]  # noqa: E731
    return m.c(checkpoint(inner, m.a(x), use_reentrant=False))  # type: ignore[no-any-return]


def inference_mode(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.inference_mode():
        fixed = m.b(h)
    return m.c(h) + fixed  # type: ignore[no-any-return]


def write_without_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        h.mul_(2)
    return m.c(m.b(h).sin()) + m.a(x).cos()  # type: ignore[no-any-return]


@pytest.mark.parametrize("structural", [False, True])
@pytest.mark.parametrize(
    "run",
    [
        no_grad_in_autocast,
        one_softmax_without_gradient,
        grad_in_no_grad,
        nested_checkpoints,
        inference_mode,
        write_without_gradient,
    ],
)
def test_gradients_are_those_of_the_model_in_two_stages(
    run: Any, structural: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Model(run), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    reference(x).float().square().sum().backward()
    if structural:  # as for a model whose copies do not fit into memory
        monkeypatch.setattr("os.sysconf", lambda _: 1)
    captured = capture(model, (x,))
    assert captured.self_check == ("structural" if structural else "values")
    chain = Chain(captured.cut("parameters", 2, measured=False))
    chain.backward(chain.forward((x,)).float().square().sum())
    got = chain.gradients()
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            assert name not in got
        else:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-4)
