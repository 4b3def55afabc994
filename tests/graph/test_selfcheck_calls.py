"""What forward remembers from call to call decides nothing, or the model is refused; what depends on autograd is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError
from stagekit.graph.capture.capture import capture


class Model(nn.Module):
    """Two layers, counters in attributes, and the function that a test gives as its forward."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.c, self.run = nn.Linear(6, 6), nn.Linear(6, 6), run
        self.n, self.seen, self.counts = 0, [0], {"calls": 0}

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def detached_after_the_first(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    h = m.a(x)
    return m.c(h.detach() if m.n > 1 else h)  # type: ignore[no-any-return]


def every_tenth(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    return m.c(m.a(x) if m.n % 10 else m.a(x) * 2)  # type: ignore[no-any-return]


def warm_up(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    return m.c(m.a(x) if m.n < 4 else m.a(x).detach())  # type: ignore[no-any-return]


def long_list(m: Any, x: Tensor) -> Tensor:
    m.seen.append(x.shape[1])
    return m.c(m.a(x) * (1 if len(m.seen) < 50 else 2))  # type: ignore[no-any-return]


def counted_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.counts["calls"] += 1
    return m.c(m.a(x) * (2 if m.counts["calls"] > 100 else 1))  # type: ignore[no-any-return]


def at_the_fifth(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    return m.c(m.a(x) * 2 if m.n == 5 else m.a(x))  # type: ignore[no-any-return]


def in_the_fourth_dozen(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    return m.c(m.a(x) * 2 if m.n // 12 == 3 else m.a(x))  # type: ignore[no-any-return]


def down_to_seven(m: Any, x: Tensor) -> Tensor:
    m.n -= 1
    return m.c(m.a(x) * 2 if not m.n + 7 else m.a(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("run", "shown"), [(at_the_fifth, "n = 4"), (in_the_fourth_dozen, "n = 38"), (down_to_seven, "n = -6")]
)
def test_a_counter_that_decides_in_a_single_call_is_refused_with_the_value_that_shows_it(run: Any, shown: str) -> None:
    with pytest.raises(CaptureError, match=rf"in a later call, with {shown} before it, output 0 differs.*as a buffer"):
        capture(Model(run), (torch.randn(4, 6),))


@pytest.mark.parametrize("run", [detached_after_the_first, every_tenth, warm_up, long_list, counted_in_a_dict])
def test_a_counter_that_decides_in_a_later_call_is_refused(run: Any) -> None:
    with pytest.raises(CaptureError, match=r"register it as a buffer"):
        capture(Model(run), (torch.randn(4, 6),))


def only_counts(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    m.seen.append(m.n)
    m.counts["calls"] += 1
    return m.c(m.a(x))  # type: ignore[no-any-return]


def reports(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    if m.n == 5 or m.n % 100 == 0 or m.n > 1000:
        m.seen.append(m.n)
    return m.c(m.a(x))  # type: ignore[no-any-return]


def noise_while_training(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(h + torch.randn_like(h) if torch.is_grad_enabled() else h)  # type: ignore[no-any-return]


def asks_for_gradients(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(h.sin() if h.requires_grad else h)  # type: ignore[no-any-return]


def and_a_mask(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x)), x > 0


@pytest.mark.parametrize("run", [only_counts, reports, noise_while_training, asks_for_gradients, and_a_mask])
def test_a_right_model_is_accepted(run: Any) -> None:
    assert capture(Model(run), (torch.randn(4, 6),)).self_check == "values"


def test_an_encoder_in_eval_mode_with_a_padding_mask_is_accepted() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[:, 3:] = True
    captured = capture(encoder, (torch.randn(4, 5, 6),), {"src_key_padding_mask": mask})
    assert captured.self_check == "values"


def test_a_model_that_fails_in_its_own_backward_is_told_so() -> None:
    def overwrites(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).exp()
        result = m.c(h)
        h.mul_(2)
        return result  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"the model itself fails in backward on the example inputs: RuntimeError"):
        capture(Model(overwrites), (torch.randn(4, 6),))
