"""Stages that run their forward again, or once before the first step: state that forward writes is as it was."""

import pytest
import torch
from torch import nn

import stagekit
from stagekit.testing import run_local


def mean_square(output, target):
    return ((output - target) ** 2).mean()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)


class CountsChunks(Layers):
    """What it computes depends on how many chunks it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        h = self.a(x) * torch.exp(-self.count)
        return self.c(self.b(h).sin())


class ScalesByState(CountsChunks):
    """Autograd keeps the written buffer itself for its backward."""

    def forward(self, x):
        self.count.add_(1)
        return self.c(self.b(self.a(x) * self.count).sin())


class Codebook(Layers):
    """A vector quantiser whose codes move towards what they are chosen for."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 6))

    def forward(self, x):
        h = self.a(x)
        chosen = torch.cdist(h.detach(), self.codes).argmin(1)
        weight = torch.nn.functional.one_hot(chosen, 4).to(h.dtype)
        with torch.no_grad():
            self.codes.mul_(0.7).add_(0.3 * weight.t() @ h)
        return self.c(self.b(h * (weight @ self.codes)).sin())


class MomentumEncoder(Layers):
    """A second encoder follows the first one, as in MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        self.follower = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.follower.parameters(), self.a.parameters(), strict=True):
                slow.mul_(0.9).add_(fast * 0.1)
            key = self.follower(x)
        return self.c((self.b(self.a(x)) * key).sin())


class ReadsRunningMean(Layers):
    """A norm's statistics, which it only brings forward, are read by another operation as well."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        h = self.norm(self.a(x))
        return self.c(self.b(h * (1 + self.norm.running_mean)).sin())


STATEFUL = [CountsChunks, ScalesByState, Codebook, MomentumEncoder, ReadsRunningMean]


def plain(build, x, target, chunks):
    torch.manual_seed(0)
    model = build()
    losses = []
    for part, wanted in zip(x.chunk(chunks), target.chunk(chunks), strict=True):
        loss = mean_square(model(part), wanted) / chunks
        loss.backward()
        losses.append(float(loss.detach()))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return sum(losses), gradients, model.state_dict()


def pipe(build, x, **options):
    return stagekit.pipeline(build, args=(x[:3],), loss_fn=mean_square, chunks=4, seed=0, **options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("build", STATEFUL)
def test_a_recomputed_stage_starts_from_the_state_that_its_chunk_found(build, schedule):
    x, target = torch.randn(12, 6), torch.randn(12, 6)
    loss, gradients, state = plain(build, x, target, 4)
    got = run_local(pipe(build, x, stages=2, split=["c"], recompute=True, schedule=schedule), x, target=target)
    assert got.loss == pytest.approx(loss, rel=1e-5)
    for name, value in gradients.items():
        torch.testing.assert_close(got.grads[name], value, rtol=1e-4, atol=1e-6)
    for name, value in got.buffers.items():
        torch.testing.assert_close(value, state[name])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("build", [CountsChunks, Codebook, MomentumEncoder])
def test_compiling_before_the_first_step_leaves_no_trace_in_what_forward_writes(build, recompute):
    x, target = torch.randn(12, 6), torch.randn(12, 6)
    loss, gradients, _ = plain(build, x, target, 4)
    run = pipe(build, x, stages=1, compile="aot_eager", recompute=recompute).deploy()
    torch.manual_seed(0)
    before = build().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in run.state_dict().items())
    assert run.step(x, target=target).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in run.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_statistics_that_a_norm_only_brings_forward_are_not_copied_per_chunk():
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    captured = pipe(build, torch.randn(12, 4), stages=1).source
    stage = captured.stage_module(0, device=torch.device("cpu"))
    assert len(stage.written_states()) == 3
    assert not stage.reread_states()
