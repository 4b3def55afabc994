"""A user's own operators: those that draw are reseeded without knowing torch's tag for it, the others stay as they are."""

import pytest
import torch
from torch import nn

import stagekit
from stagekit.testing import run_local


def mean_square(output, target):
    return ((output - target) ** 2).mean()


@torch.library.custom_op("stagekit_tests::noise_like", mutates_args=())
def noise_like(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.rand_like(x) * scale


@noise_like.register_fake
def _(x, scale):
    return torch.empty_like(x)


@torch.library.custom_op("stagekit_tests::swapped", mutates_args=())
def swapped(x: torch.Tensor, by: int) -> torch.Tensor:
    return x.flip(1).contiguous() * by


@swapped.register_fake
def _(x, by):
    return torch.empty_like(x)


@torch.library.custom_op("stagekit_tests::through_numpy", mutates_args=())
def through_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


@through_numpy.register_fake
def _(x):
    return torch.empty_like(x)


class Mixes(nn.Module):
    """Dropout around an operator whose implementation looks at values."""

    def __init__(self, operator):
        super().__init__()
        self.a, self.b, self.operator = nn.Linear(6, 6), nn.Linear(6, 6), operator

    def forward(self, x):
        h = nn.functional.dropout(self.a(x), 0.5, self.training)
        h = h * (1 + self.operator(h.detach()))
        return self.b(nn.functional.dropout(h, 0.5, self.training))


class Uses(nn.Module):
    def __init__(self, operator, *arguments):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.operator, self.arguments = operator, arguments

    def forward(self, x):
        h = self.b(self.a(x).tanh())
        return self.c(h * (1 + self.operator(h.detach(), *self.arguments)))


def pipe(x, *operator, **options):
    return stagekit.pipeline(lambda: Uses(*operator), args=(x[:2],), loss_fn=mean_square, chunks=4, seed=3, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "split": ["b"]},
        {"stages": 3, "split": ["b", "c"]},
        {"stages": 2, "split": ["c"], "recompute": True, "schedule": "gpipe"},
        {"stages": 2, "split": ["c"], "compile": "aot_eager"},
    ],
    ids=str,
)
def test_an_operator_that_draws_draws_the_same_under_every_cut(options):
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    expected = run_local(pipe(x, noise_like, 0.5, stages=1), x, target=target)
    torch.rand(7)  # another state of the generator
    got = run_local(pipe(x, noise_like, 0.5, **options), x, target=target)
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, value in expected.grads.items():
        torch.testing.assert_close(got.grads[name], value, rtol=1e-4, atol=1e-6)


def test_only_an_operator_that_is_known_not_to_draw_needs_no_seed():
    x = torch.randn(8, 6)
    assert not any(stage.draws for stage in pipe(x, swapped, 2, stages=2).plan.model.stages)
    assert any(stage.draws for stage in pipe(x, noise_like, 0.5, stages=2).plan.model.stages)
    assert any(stage.draws for stage in pipe(x, through_numpy, stages=2).plan.model.stages)


@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
def test_an_operator_that_cannot_be_watched_moves_no_number_of_the_draws_after_it(compile):
    x, target = torch.randn(8, 6), torch.randn(8, 6)

    def loss_of(operator):
        pipe = stagekit.pipeline(
            lambda: Mixes(operator),
            args=(x[:2],),
            loss_fn=mean_square,
            stages=2,
            split=["b"],
            chunks=4,
            seed=3,
            compile=compile,
        )
        return run_local(pipe, x, target=target).loss

    assert loss_of(through_numpy) == pytest.approx(loss_of(lambda h: h * 2), rel=1e-6)
