"""Models that write tensors in place compute under every schedule what a plain loop over the chunks computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stagekit
from stagekit.errors import SplitError, UserError
from stagekit.testing import run_local

X, CHUNKS = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)), 3


class Model(nn.Module):
    """Three layers, a weight and two buffers, and the function that a test gives as its forward."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.w = nn.Parameter(torch.rand(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(6))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def check(run: Callable[[Any, Tensor], Tensor], x: Tensor = X, example: Tensor | None = None, **options: Any) -> None:
    """Compare a step of a pipeline with one of a plain loop: loss, gradients, buffers."""
    plain, losses = Model(run), []
    for chunk in x.chunk(CHUNKS):
        loss = mean_square(plain(chunk), torch.zeros_like(chunk))
        (loss / CHUNKS).backward()
        losses.append(loss.item())
    given = x.chunk(CHUNKS)[0] if example is None else example
    options = {"stages": 2, "split": "parameters", "chunks": CHUNKS} | options
    pipe = stagekit.pipeline(Model(run), (given,), loss_fn=mean_square, **options)
    got = run_local(pipe, x, target=torch.zeros_like(x))
    assert got.loss == pytest.approx(sum(losses) / CHUNKS, rel=1e-5)
    for name, parameter in plain.named_parameters():
        found, expected = (
            torch.zeros_like(parameter) if grad is None else grad for grad in (got.grads.get(name), parameter.grad)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(got.buffers.get(name, buffer), buffer)


@pytest.fixture(params=["values", "structural"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let captures be checked as of a small model, and as of one whose copies do not fit into memory."""
    if request.param == "structural":
        monkeypatch.setattr("os.sysconf", lambda _: 1)
    return str(request.param)


@torch.library.custom_op("stagekit_tests::scale_", mutates_args={"x"})
def scale_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("stagekit_tests::scale", mutates_args=())
def scale(x: Tensor) -> Tensor:
    return x * 3


@scale.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_of_the_user_is_not_taken_for_another_one_with_a_like_name(checked: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.b(m.a(x))
        k = h.detach().clone()
        scale_(k)
        return m.c(h * k)  # type: ignore[no-any-return]

    check(run)


def test_a_value_copied_into_an_empty_tensor_has_its_gradient(checked: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).sin()
        k = torch.empty_like(h)
        k.copy_(m.b(h).sin())
        return m.c(k * h)  # type: ignore[no-any-return]

    check(run)


def test_a_value_that_is_zeroed_or_drawn_anew_passes_no_gradient_on(checked: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h, k = m.a(x).sin(), m.b(x).sin()
        h.zero_()
        k.polygamma_(1).zero_()
        return m.c(m.b(x) + h + k)  # type: ignore[no-any-return]

    check(run)


def clamp(m: Any) -> None:
    with torch.no_grad():
        m.b.weight.clamp_(-0.2, 0.2)


def normalise(m: Any) -> None:
    with torch.no_grad():
        m.b.weight.div_(m.b.weight.norm())


def scale_data(m: Any) -> None:
    m.b.weight.data.mul_(0.9)


def scale_rows(m: Any) -> None:
    with torch.no_grad():
        m.b.weight[:3].mul_(0.9)
        m.b.weight.detach().t()[:2].add_(0.1)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", False), ("zb-h1", True)])
@pytest.mark.parametrize("write", [clamp, normalise, scale_data, scale_rows])
def test_a_weight_written_without_gradients_and_read_after_it_has_its_gradient(
    write: Any, schedule: str, recompute: bool
) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).sin()
        write(m)
        return m.c(m.b(h).sin())  # type: ignore[no-any-return]

    check(run, schedule=schedule, recompute=recompute)


def test_views_of_a_weight_written_early_and_read_late_are_read_as_written() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h, w, rows = m.a(x).sin(), m.w.data, m.b.weight[:1].t()
        w.mul_(0.9)
        written = m.b.weight.data[1].mul_(0.8)
        return m.c(m.b(h * m.w) * w * written + rows.sum())  # type: ignore[no-any-return]

    check(run, schedule="zb-h1")


def count(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.c(m.b(m.a(x)))  # type: ignore[no-any-return]


def count_and_read(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.c(m.b(m.a(x))) * m.steps  # type: ignore[no-any-return]


def assign(m: Any, x: Tensor) -> Tensor:
    m.steps = m.steps + 1
    return m.c(m.b(m.a(x)))  # type: ignore[no-any-return]


def average(m: Any, x: Tensor) -> Tensor:
    m.average = 0.9 * m.average + 0.1 * x.detach().mean(0)
    return m.c(m.b(m.a(x))) + m.average  # type: ignore[no-any-return]


def average_and_read_the_old_one(m: Any, x: Tensor) -> Tensor:
    h = m.b(m.a(x)) * m.average
    m.average = 0.9 * m.average + 0.1 * h.detach().mean(0) + 1
    m.average.mul_(0.5)
    return m.c(h) * m.average  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [count, count_and_read, assign, average, average_and_read_the_old_one])
def test_a_buffer_assigned_at_the_start_of_forward_leaves_the_rest_to_be_cut(run: Any) -> None:
    check(run, stages=3, schedule="zb-h1")


def test_a_buffer_that_is_read_first_and_written_last_is_named_where_it_leaves_no_cut() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.c(m.b(m.a(x + m.average)))
        m.average.add_(h.detach().mean(0))
        return h  # type: ignore[no-any-return]

    with pytest.raises(SplitError, match=r"buffer 'average' at .*test_writes.py.* to the last at .*test_writes.py"):
        check(run)


def write_what_was_reshaped(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).sin()
    part = h[:, :5].reshape(-1)
    part.mul_(2)
    return m.c(m.b(h).sin())  # type: ignore[no-any-return]


def read_what_was_flattened(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).sin()
    part = h[:, :5].flatten(0, 1)
    h.add_(2)
    return m.c(m.b(h).sin()) + part.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [write_what_was_reshaped, read_what_was_flattened])
def test_a_size_at_which_a_reshape_no_longer_copies_is_refused_where_one_of_both_is_written(
    run: Any, checked: str
) -> None:
    x = torch.randn(12, 8, 6)
    check(run, x)
    check(run, x[:, :6].contiguous(), example=x[:4])
    with pytest.raises(UserError, match=r"6\*"):
        check(run, x[:, :5].contiguous(), example=x[:4])


def reshape_only(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).sin()
    return m.c(m.b(h).sin()) + h[:, :5].reshape(-1).sum()  # type: ignore[no-any-return]


def write_a_reshape_of_a_value_that_nobody_reads(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).sin()[:, :5].reshape(-1, 6)
    return m.c(m.b(h.mul_(2)).view(x.shape[0], -1, 6)).mean(1, keepdim=True) + x  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [reshape_only, write_a_reshape_of_a_value_that_nobody_reads])
def test_any_size_will_do_where_it_does_not_matter_whether_a_reshape_copies(run: Any) -> None:
    x = torch.randn(12, 8, 6)
    check(run, x[:, :5].contiguous(), example=x[:4])
