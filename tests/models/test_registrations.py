"""One tensor registered in two ways: a parameter that is a buffer as well, in one stage and across a cut."""

import pytest
import torch
from torch import nn

import stagekit
from stagekit.testing import run_local


def mean_square(output, target):
    return ((output - target) ** 2).mean()


class ParameterAsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("w", self.a.weight)

    def forward(self, x):
        return self.c(self.b(self.a(x)).sin() @ self.w)


def pipe(x, **options):
    return stagekit.pipeline(ParameterAsBuffer, args=(x[:4],), loss_fn=mean_square, chunks=2, seed=0, **options)


def trained(x, target):
    torch.manual_seed(0)
    model = ParameterAsBuffer()
    mean_square(model(x), target).backward()
    return model


@pytest.mark.parametrize("split", [["b"], ["c"]])
def test_a_parameter_that_is_registered_as_a_buffer_too_trains_as_in_the_plain_module(split):
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    got = run_local(pipe(x, stages=2, split=split), x, target=target)
    for name, parameter in trained(x, target).named_parameters():
        torch.testing.assert_close(got.grads[name], parameter.grad)


def test_a_run_names_such_a_parameter_as_the_plain_module_does():
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    run = pipe(x, stages=1).deploy()
    run.step(x, target=target)
    plain = trained(x, target)
    assert [name for name, _ in run.named_parameters()] == [name for name, _ in plain.named_parameters()]
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert run.clip_grad_norm_(1e9) == pytest.approx(float(norm), rel=1e-5)
    assert run.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(run.state_dict(), strict=True)
