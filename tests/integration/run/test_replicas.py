"""The order of gradient collectives is the same on every replica, whatever each one's data does."""

import pytest
import torch
from torch import nn

from stagekit.plan.plan import make_plan
from stagekit.run.lane import RunOptions
from stagekit.run.runtime import Run
from stagekit.testing import ChainSource, spawn

WIDTH, CHUNKS = 8, 2


def modules():
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def valid_rows(target):
    return float((~target.isnan().any(1)).sum())


def batch(replica):
    generator = torch.Generator().manual_seed(replica)
    x, target = (torch.randn(2 * CHUNKS, WIDTH, generator=generator) for _ in range(2))
    if replica == 1:
        target[-2:] = float("nan")  # the last chunk of this replica weighs nothing: no hook ever fires there
    return x, target


def train(rank):
    source = ChainSource(modules(), WIDTH, 2)
    plan = make_plan(source.spec, schedule="gpipe", num_chunks=CHUNKS, stages_per_rank=2, replicas=2)
    run = Run(source, plan, RunOptions(mean_square, valid_rows, 0), torch.device("cpu"), None)
    x, target = batch(run.replica)
    loss = run.step(x, target=target).loss
    return loss, {name: p.grad for name, p in run.named_parameters()}


def test_a_last_chunk_that_weighs_nothing_on_one_replica_mixes_no_buckets_up():
    # Ranks 0 and 1 are replica 0: stages 0 and 2, stages 1 and 3. Zeros reach stage 1, but nothing stage 3 itself.
    results = spawn(train, 4)
    loss, gradients = results[0][0], results[0][1] | results[1][1]
    others = results[2][1] | results[3][1]
    model = nn.Sequential(*modules())
    pieces = [(x, t) for r in range(2) for x, t in zip(*(v.chunk(CHUNKS) for v in batch(r)), strict=True)]
    pieces = [(x, t) for x, t in pieces if valid_rows(t)]
    total = sum(mean_square(model(x), t) * valid_rows(t) for x, t in pieces) / sum(valid_rows(t) for _, t in pieces)
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
        assert torch.equal(gradients[name], others[name])
