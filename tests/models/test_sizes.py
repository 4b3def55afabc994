"""Sizes that export never looks at, orders that Python does not care about, and dropout that was compiled."""

import pytest
import torch
from torch import nn

import stagekit
from stagekit.errors import ShapeError
from stagekit.testing import run_local


def mean_square(output, target):
    return ((output - target) ** 2).mean()


class CentresRows(nn.Module):
    """Another function of one row than of several."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[0] > 1:
            x = x - x.mean(0)
        return self.second(torch.tanh(self.first(x)))


def test_a_model_that_treats_one_row_otherwise_refuses_chunks_of_one_row():
    pipe = stagekit.pipeline(CentresRows, args=(torch.randn(4, 4),), loss_fn=mean_square, stages=2, chunks=4)
    run_local(pipe, torch.randn(8, 4), target=torch.randn(8, 4))
    with pytest.raises(ShapeError, match=r"args\[0\] has size 1 in dimension 0; the model was captured for 2\.\."):
        run_local(pipe, torch.randn(5, 4), target=torch.randn(5, 4))


def test_batchnorm_refuses_one_row_as_the_plain_module_does():
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    pipe = stagekit.pipeline(build, args=(torch.randn(4, 4),), loss_fn=mean_square, stages=2, chunks=4)
    with pytest.raises(ShapeError, match="captured for 2"):
        run_local(pipe, torch.randn(5, 4), target=torch.randn(5, 4))


def test_an_ordinary_model_takes_chunks_of_one_row():
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    pipe = stagekit.pipeline(build, args=(torch.randn(4, 4),), loss_fn=mean_square, stages=2, chunks=4)
    x, target = torch.randn(5, 4), torch.randn(5, 4)
    torch.manual_seed(0)
    expected = mean_square(build()(x), target).item()
    assert run_local(pipe, x, target=target).loss == pytest.approx(expected, rel=1e-6)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *, x, options):
        return self.second(self.first(x) * options["scale"] + options["shift"])


def test_keywords_and_dicts_may_come_in_any_order():
    x, scale, shift = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)
    example = {"x": x, "options": {"scale": scale, "shift": shift}}
    pipe = stagekit.pipeline(Masked, kwargs=example, loss_fn=mean_square, stages=2, chunks=2)
    target = torch.randn(2, 4)
    one = run_local(pipe, target=target, x=x, options={"scale": scale, "shift": shift})
    other = run_local(pipe, target=target, options={"shift": shift, "scale": scale}, x=x)
    assert one.loss == other.loss
    with pytest.raises(ShapeError, match="pass the same structure"):
        run_local(pipe, target=target, x=x, options={"scale": scale})


@pytest.mark.parametrize("seed", range(4))
def test_compiled_dropout_takes_every_seed_and_is_independent_of_the_cut(seed):
    def build():
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    x, target = torch.randn(8, 4), torch.randn(8, 4)
    losses = [
        run_local(
            stagekit.pipeline(
                build, args=(x[:2],), loss_fn=mean_square, stages=stages, chunks=4, compile="aot_eager", seed=seed
            ),
            x,
            target=target,
        ).loss
        for stages in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
