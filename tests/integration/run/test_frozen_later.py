"""Parameters frozen or thawed between two steps, with replicas and ties: as in a plain loop, or refused on every rank."""

import pytest
import torch
from torch import nn

from stagekit.api import capture_model, plan_pipeline
from stagekit.errors import StagekitError
from stagekit.testing import spawn
from tests.integration.run.parallelized import KINDS, loss

WIDTH, ROWS, CHUNKS, STEPS = 8, 16, 2, 3
FROZEN = ["layers.1.weight", "layers.3.bias", "layers.0.weight"]  # the last one is tied over stages
SCHEDULES = ("1f1b", "zb-h1")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[4].weight = self.layers[0].weight
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return x, target


def set_training(module, trains, names=FROZEN):
    for name, parameter in module.named_parameters():
        if name in names:
            parameter.requires_grad_(trains)


def optimizer_of(module):
    return torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)  # moves what has a gradient of zeros too


def step(run, number):
    x, target = (part.chunk(2)[run.replica] for part in batch(number))
    return run.step(x, target=target)


def trained(run):
    optimizer, missing = optimizer_of(run), []
    for number in range(STEPS):
        set_training(run, number != 1)
        step(run, number)
        missing.append({name for name, parameter in run.named_parameters() if parameter.grad is None})
        optimizer.step()
        optimizer.zero_grad()
    return run.state_dict(), missing


def refused(run, names, trains=False):
    """Change parameters on this rank where `names` has any; return what the next step says, then that of a good one."""
    set_training(run, trains, names)
    with pytest.raises(StagekitError) as caught:
        step(run, 0)
    set_training(run, not trains, names)
    step(run, 0)
    return str(caught.value)


def everything(rank):
    source, results = capture_model(Model, (torch.zeros(4, WIDTH),)), {}

    def deployed(schedule, **options):
        return plan_pipeline(
            source, loss_fn=loss, stages=2, chunks=CHUNKS, schedule=schedule, replicas=2, split=["layers.3"],
            measured=False, buckets={"cap": 300, "first": 200}, **options,
        ).deploy()  # fmt: skip

    for schedule in SCHEDULES:
        results[schedule] = trained(deployed(schedule))
    run = deployed("1f1b")
    results["one replica"] = refused(run, ["layers.1.weight"] if rank == 0 else [])
    results["one copy"] = refused(run, ["layers.0.weight"] if rank in (0, 2) else [])
    results["thawed"] = refused(run, ["layers.2.bias"] if rank == 0 else [], trains=True)
    run.zero_grad()
    with run.no_sync():
        step(run, 0)
    results["between summed steps"] = refused(run, ["layers.1.weight"] if rank == 0 else [])
    return results


def test_parameters_frozen_between_steps_have_no_gradient_on_any_replica_and_what_only_some_freeze_is_refused():
    ranks = spawn(everything, 4, timeout_s=100.0)
    model = Model()
    optimizer = optimizer_of(model)
    for number in range(STEPS):
        set_training(model, number != 1)
        loss(model(batch(number)[0]), batch(number)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for schedule in SCHEDULES:
        got, again = (ranks[first][schedule][0] | ranks[first + 1][schedule][0] for first in (0, 2))
        for name, value in model.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=f"{schedule} {name}")
            assert torch.equal(got[name], again[name]), (schedule, name)
        missing = [ranks[0][schedule][1][n] | ranks[1][schedule][1][n] for n in range(STEPS)]
        assert missing == [{"layers.2.bias"}, {"layers.2.bias", *FROZEN}, {"layers.2.bias"}], schedule
    for rank in ranks:
        assert "layers.1.weight (stage 0) was frozen on some replicas and trains on others" in rank["one replica"]
        assert "layers.0.weight is tied over stages, and only some of its copies were frozen" in rank["one copy"]
        assert "layers.2.bias was frozen when the model was captured" in rank["thawed"]
        assert "layers.1.weight was frozen or thawed between steps whose gradients are" in rank["between summed steps"]


def wrapped_and_frozen(rank):
    source, results = capture_model(Model, (torch.zeros(4, WIDTH),)), {}
    for kind, parallelize in KINDS.items():
        run = plan_pipeline(
            source, loss_fn=loss, stages=2, chunks=CHUNKS, replicas=2, split=["layers.3"], measured=False,
            parallelize=parallelize,
        ).deploy()  # fmt: skip
        results[kind] = refused(run, ["layers.1.weight"])
    return results


def test_what_torchs_wrappers_sum_can_not_be_frozen_after_deploy():
    for rank in spawn(wrapped_and_frozen, 4, timeout_s=60.0):
        for kind in KINDS:
            assert "layers.1.weight (stage 0) was frozen after parallelize gave it to" in rank[kind], kind
