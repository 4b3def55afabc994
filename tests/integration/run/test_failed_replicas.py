"""A step that fails on one replica of stages that `parallelize` changed: all ranks hear it, and nothing of it is left."""

import time

import pytest
import torch
from torch import nn

import stagekit
from stagekit.errors import StagekitError
from stagekit.testing import spawn
from tests.integration.run.parallelized import KINDS, loss, whole_gradients

WIDTH, ROWS = 8, 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)  # its buffers are the first replica's, under DDP

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def deployed(kind, *, is_frozen=False):
    model = Model()
    model.layers[:2].requires_grad_(not is_frozen)  # the first stage
    pipe = stagekit.pipeline(
        model, (torch.zeros(3, WIDTH),), loss_fn=loss, stages=2, replicas=2, chunks=2, split=["layers.2"],
        parallelize=KINDS[kind],
    )  # fmt: skip
    return pipe.deploy()


def step(run, x, target):
    rows = slice(run.replica * ROWS // 2, (run.replica + 1) * ROWS // 2)
    return run.step(x[rows], target=target[rows]).loss


def accumulated(rank):
    """Accumulate a batch, fail on the next (with and without synchronisation), go on with a third."""
    results = {}
    for kind in KINDS:
        run = deployed(kind)
        (x, target), (bad_x, bad), (more_x, more) = batch(1), batch(2), batch(3)
        bad[-1] = 99.0
        with run.no_sync():
            step(run, x, target)
            with pytest.raises(StagekitError, match="a target beyond reach"):
                step(run, bad_x, bad)
        with pytest.raises(StagekitError, match="a target beyond reach"):
            step(run, bad_x, bad)
        step(run, more_x, more)
        results[kind] = whole_gradients(run)
        run.close()
    return results


def test_a_failed_step_between_accumulated_ones_leaves_what_the_earlier_ones_left():
    ranks = spawn(accumulated, 4, timeout_s=120.0)
    model = Model()
    for number in (1, 3):
        x, target = batch(number)
        for chunk_x, chunk_target in zip(x.split(3), target.split(3), strict=True):  # the norm is each chunk's own
            (loss(model(chunk_x), chunk_target) / 4).backward()
    for kind in KINDS:
        got = ranks[0][kind] | ranks[1][kind]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(got[name], parameter.grad, msg=f"{kind} {name}")


CASES = [("FSDP2", False), ("DDP", False), ("FSDP2", True)]  # kind, whether the first stage is frozen


def late(rank):
    """One replica's first stage fails long after the others' began to wait for it: in the first step, and in a later one."""
    results = {}
    for case in CASES:
        run = deployed(case[0], is_frozen=case[1])
        x, target = batch(1)
        losses = []
        for fails in (True, False, False, True, False):
            if fails and run.replica == 1 and 0 in run._runners:
                run._runners[0].forward = fail_late
            if fails:
                with pytest.raises(StagekitError, match="a late failure"):
                    step(run, x, target)
                vars(run._runners.get(0, run)).pop("forward", None)
            else:
                losses.append(step(run, x, target))
        results[case] = losses
        run.close()
    return results


def fail_late(*_):
    time.sleep(0.5)
    raise ValueError("a late failure")


def test_a_replica_that_fails_before_its_forward_keeps_no_other_waiting():
    ranks = spawn(late, 4, timeout_s=120.0)
    for case in CASES:
        assert all(rank[case] == [pytest.approx(ranks[0][case][0])] * 3 for rank in ranks), case
