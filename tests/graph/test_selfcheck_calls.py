"""What forward remembers from call to call decides nothing, or the model is refused; what depends on autograd is right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
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
        self.n, self.seen, self.counts, self.time = 0, [0], {"calls": 0}, 0.0
        self.state, self.mixed = SimpleNamespace(n=0), {"scale": torch.ones(6), "now": [SimpleNamespace(n=0)]}

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


def sixth_by_a_dict(m: Any) -> bool:
    m.counts["calls"] += 1
    return bool(m.counts["calls"] == 6)


def sixth_by_a_list_element(m: Any) -> bool:
    m.seen[0] += 1
    return bool(m.seen[0] == 6)


def sixth_by_a_length(m: Any) -> bool:
    m.seen.append(0)
    return len(m.seen) == 7


def sixth_by_a_float(m: Any) -> bool:
    m.time += 1.0
    return bool(m.time == 6)


def sixth_by_a_set(m: Any) -> bool:
    m.n += 1
    return m.n in {6, 9}


def sixth_by_a_ratio(m: Any) -> bool:
    m.n += 1
    return bool(1 < m.n / 5 < 1.3)


def sixth_by_bits(m: Any) -> bool:
    m.n += 1
    return bool(m.n & 7 == 6)


def past_the_fifth_in_a_namespace(m: Any) -> bool:
    m.state.n += 1
    return bool(m.state.n > 5)


def sixth_beside_a_tensor(m: Any) -> bool:
    m.mixed["now"][0].n += 1
    return bool(m.mixed["now"][0].n == 6)


@pytest.mark.parametrize(
    ("is_sixth", "kept"),
    [
        (sixth_by_a_dict, "counts"),
        (sixth_by_a_list_element, "seen"),
        (sixth_by_a_length, "seen"),
        (sixth_by_a_float, "time"),
        (sixth_by_a_set, "n"),
        (sixth_by_a_ratio, "n"),
        (sixth_by_bits, "n"),
        (past_the_fifth_in_a_namespace, r"state\.n"),
        (sixth_beside_a_tensor, r"mixed\.now\.0\.n"),
    ],
)
def test_a_model_that_does_something_else_in_its_sixth_call_is_refused_however_it_counts(
    is_sixth: Callable[[Any], bool], kept: str
) -> None:
    model = Model(lambda m, x: m.c(m.a(x) * 2 if is_sixth(m) else m.a(x)))
    with pytest.raises(CaptureError, match=rf"call.*with.* {kept}.*, output 0 differs.*buffer"):
        capture(model, (torch.randn(4, 6),))


def test_a_queue_of_objects_that_runs_empty_and_a_logger_disturb_nothing() -> None:
    def takes_one(m: Any, x: Tensor) -> Tensor:
        m.n += 1
        if m.mixed["now"]:
            m.mixed["now"].pop()
        return m.c(m.a(x))  # type: ignore[no-any-return]

    model = Model(takes_one)
    model.mixed["now"] *= 3
    model.log = logging.getLogger("model")
    assert capture(model, (torch.randn(4, 6),)).self_check.startswith("values; forward changes n: ")
    assert len(model.mixed["now"]) == 3


def test_a_factor_looked_up_by_the_number_of_the_call_is_refused() -> None:
    def factor(m: Any, x: Tensor) -> Tensor:
        m.n += 1
        return m.c(m.a(x) * {6: 2.0}.get(m.n, 1.0))  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"in call 6, with what forward keeps in n, output 0 differs"):
        capture(Model(factor), (torch.randn(4, 6),))


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


def logs_a_mean(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    h = m.a(x)
    if m.n in {6, 9}:
        m.mean = h.detach().mean()
    return m.c(h)  # type: ignore[no-any-return]


def noise_while_training(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(h + torch.randn_like(h) if torch.is_grad_enabled() else h)  # type: ignore[no-any-return]


def asks_for_gradients(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(h.sin() if h.requires_grad else h)  # type: ignore[no-any-return]


def and_a_mask(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x)), x > 0


@pytest.mark.parametrize("run", [noise_while_training, asks_for_gradients, and_a_mask])
def test_a_right_model_is_accepted(run: Any) -> None:
    assert capture(Model(run), (torch.randn(4, 6),)).self_check == "values"


@pytest.mark.parametrize(("run", "names"), [(only_counts, "n, seen, counts"), (reports, "n"), (logs_a_mean, "n")])
def test_a_model_that_only_counts_is_accepted_and_the_plan_names_what_it_counts(run: Any, names: str) -> None:
    assert capture(Model(run), (torch.randn(4, 6),)).self_check.startswith(f"values; forward changes {names}: ")


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
