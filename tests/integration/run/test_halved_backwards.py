"""Weight gradients that wait (zb-h1): whatever else a step trains gets the gradient that a plain loop gives it."""

import pytest
import torch
from torch import nn

import stagekit
from stagekit.run.local import LocalRun
from stagekit.testing import InProcessTransport, Mailbox

WIDTH, ROWS, STEPS = 8, 12, 2
SCHEDULES = ("1f1b", "zb-h1")


class Scaled(nn.Module):
    """Six layers; `y` multiplies what layer number `at` made."""

    def __init__(self, at):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.at = at

    def forward(self, x, y):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == self.at:
                x = x * y
        return x


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def local(schedule, at=1, loss=mean_square):
    """Deploy three stages, all in this process."""
    example = (torch.randn(3, WIDTH), torch.randn(3, WIDTH))
    pipe = stagekit.pipeline(
        Scaled(at), example, loss_fn=loss, stages=3, chunks=4, schedule=schedule, split=["layers.2", "layers.4"]
    )
    mailbox = Mailbox()
    return LocalRun(pipe.source, pipe.plan, pipe.options, lambda rank: InProcessTransport(rank, mailbox))


def parameters(run):
    return {name: p for runner in run._runners.values() for name, p in runner.module.named_parameters()}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(3)]


def same(gradients, model):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at", [1, 3, 5])  # each is read on another stage
@pytest.mark.parametrize("computed", [False, True])
def test_an_input_that_requires_grad_gets_its_gradient_on_every_step_wherever_it_is_read(schedule, at, computed):
    run, model = local(schedule, at), Scaled(at)
    for step in range(STEPS):
        x, y, target = batch(step)
        factor, plain = (torch.ones((), requires_grad=True) for _ in range(2))
        ours, theirs = y.clone().requires_grad_(), y.clone().requires_grad_()
        run.step((x, ours + factor if computed else ours), {}, target)
        mean_square(model(x, theirs + plain if computed else theirs), target).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        torch.testing.assert_close(factor.grad, plain.grad)
    same(run.gradients(), model)


class Switched(nn.Module):
    """A loss that trains one of its two scales; `into` writes it into the output."""

    def __init__(self, into):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(2))
        self.use, self.into = 0, into

    def forward(self, output, target):
        scale = self.scales[self.use]
        scaled = output.mul_(scale) if self.into else output * scale
        return mean_square(scaled, target)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("into", [False, True])
def test_a_parameter_of_the_loss_trains_from_the_step_that_first_uses_it(schedule, into):
    ours, theirs = Switched(into), Switched(into)
    run, model = local(schedule, 5, ours), Scaled(5)  # ends in an operation that needs no output of its own later
    for step in range(STEPS):
        x, y, target = batch(step)
        ours.use = theirs.use = step
        run.step((x, y), {}, target)
        theirs(model(x, y), target).backward()
    for mine, expected in zip(ours.scales, theirs.scales, strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
    same(run.gradients(), model)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("read", ["layers.4.weight", "layers.5.bias"])
def test_a_loss_may_decay_the_weights_of_the_last_stage(schedule, read):
    decayed = {}
    run = local(schedule, 3, lambda output, target: mean_square(output, target) + (decayed[read] ** 2).sum())
    decayed[read] = parameters(run)[read]
    model = Scaled(3)
    x, y, target = batch(0)
    run.step((x, y), {}, target)
    (mean_square(model(x, y), target) + (model.get_parameter(read) ** 2).sum()).backward()
    same(run.gradients(), model)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frozen", ["layers.2.weight", "layers.4.weight", "layers.4.bias"])
def test_a_parameter_frozen_between_steps_gets_no_gradient_any_more_and_one_thawed_gets_it_again(schedule, frozen):
    run, x_y_target = local(schedule, 3), batch(0)
    steps = []
    for trains in (True, False, True):
        parameters(run)[frozen].requires_grad_(trains)
        for parameter in parameters(run).values():
            parameter.grad = None
        run.step(tuple(x_y_target[:2]), {}, x_y_target[2])
        steps.append(run.gradients())
    assert steps[1].pop(frozen) is None
    for name, gradient in steps[1].items():
        assert torch.equal(gradient, steps[0][name])
    assert torch.equal(steps[0][frozen], steps[2][frozen])
