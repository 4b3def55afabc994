"""SyncBatchNorm normalises a chunk by the rows of all replicas' chunks of its number; BatchNorm by each replica's own.

Four real processes run all cases one after the other: 2 stages x 2 replicas, on CPUs.
"""

import functools

import pytest
import torch
from torch import nn

import stagekit
from stagekit.api import capture_model, plan_pipeline
from stagekit.errors import CaptureError, StagekitError
from stagekit.testing import spawn

WIDTH, CHUNKS, CHUNK_ROWS, STEPS = 6, 4, 3, 3
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # → stages per rank
ROWS = CHUNKS * CHUNK_ROWS  # of one replica


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.enter, self.norm, self.leave = (
            nn.Linear(WIDTH, channels),
            nn.BatchNorm1d(channels),
            nn.Linear(channels, WIDTH),
        )
        self.side = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x):
        return self.side(x) + self.leave(torch.relu(self.norm(self.enter(x))))


class Model(nn.Module):
    """Norms of unequal widths; those of the first block are frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(4 + 3 * index) for index in range(4))
        self.blocks[0].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def synced():
    return nn.SyncBatchNorm.convert_sync_batchnorm(Model())


def loss(output, target):
    if bool((target > 90).any()):
        raise ValueError("a target beyond reach")
    return ((output - target) ** 2).mean()


def valid_rows(target):
    return float((~target.isnan().any(1)).sum())


def batch(number, replica):
    generator = torch.Generator().manual_seed(2 * number + replica)
    x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return 1.5 * x + replica, target


@functools.cache
def captured(build):
    return capture_model(build, (torch.zeros(CHUNK_ROWS, WIDTH),))


def deployed(build, schedule, **options):
    per_rank = SCHEDULES[schedule]
    stages = 2 * per_rank
    return plan_pipeline(
        captured(build), loss_fn=loss, stages=stages, chunks=CHUNKS, schedule=schedule, stages_per_rank=per_rank,
        replicas=2, split=[f"blocks.{4 * cut // stages}" for cut in range(1, stages)], measured=False, **options,
    ).deploy()  # fmt: skip


def trained(run, *, weightless=False):
    """Train; after the first step one fails on one replica, and leaves nothing."""
    optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for number in range(STEPS):
        x, target = batch(number, run.replica)
        if weightless and run.replica == 1:
            target[-CHUNK_ROWS:] = float("nan")
        run.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            x, target = batch(9, run.replica)
            if run.replica == 1:
                target[-1] = 99.0
            with pytest.raises(StagekitError, match="a target beyond reach"):
                run.step(x, target=target)
    state = run.state_dict()
    run.close()
    return state


def case(name):
    if name == "recompute":
        return trained(deployed(synced, "1f1b", recompute=True))
    if name == "weightless":
        return trained(deployed(synced, "zb-h1", loss_weight=valid_rows), weightless=True)
    if name == "compiled":
        return trained(deployed(synced, "1f1b", compile="aot_eager"))
    return trained(deployed(Model, "1f1b")) if name == "its own" else trained(deployed(synced, name))


def cases(rank, names):
    return {name: case(name) for name in names}


def alone(*, weightless=False):
    """Train BatchNorm in this process on the chunks of both replicas together."""
    model = Model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for number in range(STEPS):
        halves = [[part.split(CHUNK_ROWS) for part in batch(number, replica)] for replica in range(2)]
        for chunk in range(CHUNKS):
            x = torch.cat([half[0][chunk] for half in halves])
            outputs = model(x).split(CHUNK_ROWS)
            counted = 1 if weightless and chunk == CHUNKS - 1 else 2
            total = sum(loss(outputs[r], halves[r][1][chunk]) for r in range(counted))
            (total / (2 * CHUNKS - weightless)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture(scope="module")
def ranks():
    return spawn(cases, 4, ["zb-v", "recompute", "weightless", "its own"])


def check(ranks, case):
    got, again = (ranks[first][case] | ranks[first + 1][case] for first in (0, 2))
    expected = alone(weightless=case == "weightless")
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=f"{case} {name}")
        assert torch.equal(got[name], again[name]), name


@pytest.mark.parametrize("case", ["zb-v", "recompute", "weightless"])
def test_sync_batch_norm_equals_batch_norm_over_both_replicas_chunks(ranks, case):
    check(ranks, case)


@pytest.mark.soak
def test_sync_batch_norm_equals_batch_norm_under_every_schedule_and_compiled():
    names = [*SCHEDULES, "compiled"]
    ranks = spawn(cases, 4, names, timeout_s=240.0)
    for name in names:
        check(ranks, name)


def test_batch_norm_has_each_replicas_own_statistics_beside_equal_weights(ranks):
    got, again = (ranks[first]["its own"] | ranks[first + 1]["its own"] for first in (0, 2))
    own = nn.BatchNorm1d(WIDTH, affine=False)
    for number in range(STEPS):
        for chunk in batch(number, 0)[0].split(CHUNK_ROWS):
            own(chunk)
    torch.testing.assert_close(got["blocks.0.side.running_mean"], own.running_mean)
    for name, value in got.items():
        assert torch.equal(value, again[name]) == ("running" not in name), name


def test_alone_it_is_batch_norm_to_the_last_bit_and_what_it_cannot_do_is_refused():
    x, target = batch(0, 0)
    states = []
    for build in (Model, synced):
        run = stagekit.pipeline(build, (x[:CHUNK_ROWS],), loss_fn=loss, stages=1, chunks=CHUNKS).deploy()
        run.step(x, target=target)
        states.append(
            run.state_dict() | {f"gradient of {n}": p.grad for n, p in run.named_parameters() if p.grad is not None}
        )
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    with pytest.raises(CaptureError, match="momentum=None"):
        capture_model(nn.Sequential(nn.SyncBatchNorm(WIDTH, momentum=None)), (x,))
    with pytest.raises(CaptureError, match="process_group of its own"):
        capture_model(nn.Sequential(nn.SyncBatchNorm(WIDTH, process_group="some ranks")), (x,))
