"""Parameters and buffers that share memory without being one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError
from stagekit.graph.capture.capture import capture


class Shares(nn.Module):
    """Three layers of a size, and whatever `change` makes of them."""

    def __init__(self, change: Any, forward: Any = None, size: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(size, size) for _ in range(3))
        self.function = forward
        change(self)

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        return self.c(self.function(self, h) if self.function else h)


def buffer_of_weight(model: Any) -> None:
    model.register_buffer("w", model.a.weight.detach())


def second_parameter(model: Any) -> None:
    model.c.weight = nn.Parameter(model.a.weight.data)


def window_of_buffer(model: Any) -> None:
    model.register_buffer("v", torch.zeros(8))
    model.register_buffer("v2", model.v[2:])


def counts(model: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        model.v.add_(1)
    return h * model.v2


def captured(*args: Any, given: bool = False, **kwargs: Any) -> Any:
    size = kwargs.get("size", 6)
    model = Shares(*args, **kwargs) if given else lambda: Shares(*args, **kwargs)
    return capture(model, (torch.randn(2, size),))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("size", [6, 300])
def test_a_second_parameter_on_the_same_memory_is_refused_and_told_how_to_tie(given: bool, size: int) -> None:
    with pytest.raises(
        CaptureError, match=r"a\.weight and c\.weight are different tensors.*assign the Parameter itself"
    ):
        captured(second_parameter, size=size, given=given)


@pytest.mark.parametrize("given", [True, False])
def test_a_buffer_on_a_trained_weights_memory_is_refused_by_name(given: bool) -> None:
    with pytest.raises(CaptureError, match=r"a\.weight and w are different tensors on the same memory.*is trained"):
        captured(buffer_of_weight, lambda model, h: h @ model.w, given=given)


@pytest.mark.parametrize("given", [True, False])
def test_a_window_of_a_buffer_that_forward_writes_is_refused_by_name(given: bool) -> None:
    with pytest.raises(CaptureError, match=r"v and v2 are different tensors.*written in forward"):
        captured(window_of_buffer, counts, given=given)


def test_a_model_that_must_be_built_for_real_is_refused_too() -> None:
    def change(model: Any) -> None:
        model.a.weight.detach().numpy()[:] = 0.5
        second_parameter(model)

    with pytest.raises(CaptureError, match=r"a\.weight and c\.weight"):
        captured(change, size=300)


def tied(model: Any) -> None:
    model.c.weight = model.a.weight


def one_table_in_two_layers(model: Any) -> None:
    table = torch.arange(12.0).reshape(2, 6)
    model.a.register_buffer("table", table)
    model.b.register_buffer("table", table[1:], persistent=False)


def flat_weights(model: Any) -> None:
    flat = torch.randn(72)
    model.a.weight, model.b.weight = nn.Parameter(flat[:36].view(6, 6)), nn.Parameter(flat[36:].view(6, 6))


def frozen(model: Any) -> None:
    model.a.weight.requires_grad_(False)
    buffer_of_weight(model)


def an_attribute_that_forward_does_not_read(model: Any) -> None:
    model.shown = model.a.weight.data


@pytest.mark.parametrize(
    ("change", "forward"),
    [
        (tied, None),
        (one_table_in_two_layers, lambda model, h: h + model.a.table[0] + model.b.table[0]),
        (flat_weights, None),
        (frozen, lambda model, h: h @ model.w),
        (an_attribute_that_forward_does_not_read, None),
        (lambda model: nn.utils.spectral_norm(model.a), None),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_memory_that_nobody_changes_under_another_reader_may_be_shared(change: Any, forward: Any, given: bool) -> None:
    assert captured(change, forward, given=given).graph_hash
