"""Every schedule over real processes, over both transports: the bits of a plain loop, and as much in flight as was planned."""

import os

import pytest
import torch
from torch import nn

from stagekit.api import capture_model, plan_pipeline
from stagekit.plan.schedules.registry import NAMES
from stagekit.run.shm.setup import VARIABLE
from stagekit.testing import spawn

WIDTH, CHUNKS, SEED = 8, 5, 4
TRANSPORTS = ("gloo", "shm")
PER_RANK = {"interleaved": 2, "bfs": 2, "zb-v": 2, "v-half": 2, "dualpipe-v": 2}
OTHER_ORDER = ("dualpipe-v",)  # chunks from both ends alternate, so gradients are added in another order
SCHEDULES = [name for name in NAMES if name != "forward"]


def build():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3 * CHUNKS - 1, WIDTH, generator=generator), torch.zeros(3 * CHUNKS - 1, WIDTH)


def every_schedule(rank):
    x, target = batch()
    found, captured = {}, capture_model(build, (x[:3],), seed=SEED)
    for schedule in SCHEDULES:
        per_rank = PER_RANK.get(schedule, 1)
        pipe = plan_pipeline(
            captured, loss_fn=mean_square, stages=2 * per_rank, stages_per_rank=per_rank, chunks=CHUNKS,
            schedule=schedule, split="layers", seed=SEED, measured=False,
        )  # fmt: skip
        for transport in TRANSPORTS:
            os.environ[VARIABLE] = transport
            run = pipe.deploy()
            for _ in range(2):  # the second step finds buffers and receives as the first one left them
                run.zero_grad()
                loss = (run.step(x, target=target) if rank == 0 else run.step(target=target)).loss
            held = sum(runner.peak_chunks for runner in run._runners.values())
            found[schedule, transport] = {
                "loss": loss,
                "grads": {name: p.grad.clone() for name, p in run.named_parameters()},
                "held": (held, pipe.plan.timeline.peak_chunks[rank]),
                "transports": run.transports,
            }
    return found


@pytest.fixture(scope="module")
def ranks():
    return spawn(every_schedule, 2)


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(SEED)
    model, (x, target) = build(), batch()
    for xc, tc in zip(x.tensor_split(CHUNKS), target.tensor_split(CHUNKS), strict=True):
        mean_square(model(xc), tc).backward(torch.tensor(len(xc) / len(x)))
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_gives_the_gradients_of_a_plain_loop(ranks, plain, schedule, transport):
    first, second = (found[schedule, transport] for found in ranks)
    assert (first["transports"], second["transports"]) == ({1: transport}, {0: transport})
    got = first["grads"] | second["grads"]
    assert got.keys() == plain.keys()
    for name, gradient in plain.items():
        if schedule in OTHER_ORDER:
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(got[name], gradient), name
    assert first["loss"] == second["loss"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in PER_RANK])
def test_a_rank_holds_as_many_chunks_as_was_planned(ranks, schedule, transport):
    for rank in ranks:  # stages of one rank peak at different times: those schedules are compared in tests/unit/plan
        held, planned = rank[schedule, transport]["held"]
        assert held == planned
