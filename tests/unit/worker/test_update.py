"""What a worker does with a step's gradients: one optimizer step, or none where half precision overflowed."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from piped.worker.update import Update
from stagekit.plan.plan import make_plan
from stagekit.run.lane import RunOptions
from stagekit.run.runtime import Run
from stagekit.testing import ChainSource

WIDTH, RATE = 4, 0.5
TRAIN = {"clip_grad_norm": None, "accumulate": 1, "precision": "fp32"}


class Anywhere:
    """A position that nobody asks for."""

    def inside(self, section, waiting_on):
        return nullcontext()


class Program:
    """Momentum, and a rate that is halved with every update."""

    def optimizer(self, named_parameters):
        return torch.optim.SGD([p for name, p in named_parameters if "bias" not in name], lr=RATE)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.fixture
def run():
    torch.manual_seed(0)
    source = ChainSource([nn.Linear(WIDTH, WIDTH)], WIDTH, 2)
    plan = make_plan(source.spec, schedule="gpipe", num_chunks=1)
    return Run(source, plan, RunOptions(nn.functional.mse_loss, None, 0), torch.device("cpu"), None)


def stepped(run, update, number=0, *, overflow=False):
    """Run a step and its update; return the weight's change, and its gradient before."""
    weight = dict(run.named_parameters())["0.weight"]
    before = weight.detach().clone()
    update.begin()
    run.step(torch.ones(2, WIDTH), target=torch.zeros(2, WIDTH))
    if overflow:
        weight.grad[0, 0] = float("inf")
    gradient = weight.grad.clone()
    update.apply(number)
    return weight.detach() - before, gradient


def test_a_gradient_that_overflowed_skips_optimizer_and_scheduler_and_halves_the_scale(run):
    update = Update({**TRAIN, "precision": "fp16", "clip_grad_norm": 1.0}, Program(), run, Anywhere())
    change, _ = stepped(run, update, overflow=True)
    assert not change.any()
    assert update.facts() == {"loss_scale": 32768.0}
    change, gradient = stepped(run, update, 1)
    assert update.facts() == {"loss_scale": 32768.0}
    whole = torch.cat([gradient.flatten(), gradient.sum(1) / WIDTH]) / 32768.0  # with the bias, which is clipped too
    expected = gradient / 32768.0 / max(1.0, float(whole.norm()))
    torch.testing.assert_close(change, -RATE * expected, rtol=1e-4, atol=1e-6)  # the first rate still


def test_gradients_of_several_batches_are_those_of_their_mean_loss(run):
    gradients = []
    for accumulate in (1, 4):
        Update({**TRAIN, "accumulate": accumulate}, Program(), run, Anywhere()).begin()
        run.step(torch.ones(2, WIDTH), target=torch.zeros(2, WIDTH))
        gradients.append(dict(run.named_parameters())["0.weight"].grad.clone())
        run.zero_grad()
    assert gradients[0].any() and torch.equal(gradients[1] * 4, gradients[0])


def test_gradients_that_no_optimizer_takes_do_not_stay(run):
    stepped(run, Update(TRAIN, Program(), run, Anywhere()))
    assert all(parameter.grad is None for parameter in run.parameters())


def test_what_is_no_optimizer_is_refused(run):
    class Forgets(Program):
        def optimizer(self, named_parameters):
            super().optimizer(named_parameters)

    with pytest.raises(Exception, match=r"optimizer\(\) returned None"):
        Update(TRAIN, Forgets(), run, Anywhere())
