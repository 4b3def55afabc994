"""Gradients on their way between replicas, where the backward comes in halves: when they are sent, and rounded to what."""

import functools

import pytest
import torch
from torch import nn

from stagekit.api import capture_model, plan_pipeline
from stagekit.errors import StagekitError, UserError
from stagekit.testing import spawn
from tests.integration.run.parallelized import wrapped

WIDTH, ROWS, CHUNKS, LAYERS = 8, 16, 4, 8
ROUNDING = 2.0**-8  # of one conversion to bfloat16, relative: 8 bits of significand


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss(output, target):
    return ((output - target) ** 2).mean()


def batch(replica):
    generator = torch.Generator().manual_seed(replica)
    x, target = (torch.randn(ROWS // 2, WIDTH, generator=generator) for _ in range(2))
    return x, target


@functools.cache
def captured():
    return capture_model(Model, (torch.zeros(2, WIDTH),))


def pipeline(compress, **options):
    return plan_pipeline(
        captured(), loss_fn=loss, stages=2, chunks=CHUNKS, schedule="zb-h1", replicas=2, split=["layers.4"],
        buckets={"cap": 300, "first": 200, "compress": compress}, measured=False, **options,
    )  # fmt: skip


def ran(rank):
    """Return gradients and what was recorded, with and without compression."""
    results = {}
    for compress in (None, "bf16"):
        run = pipeline(compress).deploy()
        events = []
        run.on_action(lambda *event, events=events: events.append(event))
        x, target = batch(run.replica)
        run.step(x, target=target)
        waited = dict(run.executor.recorder.reduce_wait_ns)
        results[compress] = {name: p.grad for name, p in run.named_parameters()}, events, waited
    with pytest.raises(UserError, match="to torch; leave compress out"):
        pipeline("bf16", parallelize=wrapped).deploy()
    return results


@pytest.fixture(scope="module")
def ranks():
    return spawn(ran, 4)


def test_buckets_are_sent_while_weights_of_earlier_layers_are_still_to_come(ranks):
    for rank in range(4):
        _, events, waited = ranks[rank][None]
        stage = rank % 2
        reduces = [event for event in events if event[3] == "ALL_REDUCE"]
        assert [bucket for _, _, bucket, *_ in reduces] == list(range(len(reduces))) and len(reduces) > 2
        assert {event[1] for event in reduces} == {stage}
        last = max(event[5] for event in events if event[3] in ("B", "W"))
        assert min(event[4] for event in reduces) < last, f"rank {rank}"
        assert stage == 0 or any(event[3] == "W" for event in events)
        spent = max(event[5] for event in reduces) - min(event[4] for event in reduces)
        assert 0 < waited[stage] <= spent
        (reduce,) = [event for event in events if event[3] == "REDUCE"]
        assert waited[stage] <= reduce[5] - reduce[4]


def test_compressed_gradients_are_off_by_their_roundings_and_equal_on_all_replicas(ranks):
    parts = []
    for replica in range(2):
        model = Model()
        x, target = batch(replica)
        (loss(model(x), target) / 2).backward()
        parts.append({name: parameter.grad for name, parameter in model.named_parameters()})
    exact, rounded = ({**ranks[0][kind][0], **ranks[1][kind][0]} for kind in (None, "bf16"))
    others = {**ranks[2]["bf16"][0], **ranks[3]["bf16"][0]}
    for name, mine in parts[0].items():
        theirs = parts[1][name]
        torch.testing.assert_close(exact[name], mine + theirs, rtol=1e-5, atol=1e-7, msg=name)
        bound = ROUNDING * (mine.abs() + theirs.abs() + (mine + theirs).abs()) * 1.05 + 1e-7  # two parts and their sum
        assert bool(((rounded[name] - exact[name]).abs() <= bound).all()), name
        assert rounded[name].dtype == torch.float32 and not torch.equal(rounded[name], exact[name])
        assert torch.equal(rounded[name], others[name]), name


def test_a_plan_tells_that_gradients_are_rounded():
    assert pipeline("bf16").plan.bit_equal == "no (gradients are rounded to bf16 and summed over 2 replicas)"
    assert pipeline(None).plan.bit_equal == "no (gradients are summed over 2 replicas)"
    assert pipeline("bf16").plan.fingerprint != pipeline(None).plan.fingerprint


class Tied(nn.Module):
    """Three layers, the first and the last of one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def accumulated_on_sums(rank):
    captured = capture_model(Tied, (torch.zeros(2, WIDTH),))
    run = plan_pipeline(
        captured, loss_fn=loss, stages=3, chunks=2, schedule="1f1b", split=["layers.1", "layers.2"], measured=False
    ).deploy()
    x, target = batch(0)
    first = run.step(x, target=target).loss
    with run.no_sync(), pytest.raises(StagekitError, match="zero the gradients first"):
        run.step(x, target=target)
    run.zero_grad()
    with run.no_sync():
        again = run.step(x, target=target).loss
    return first == again


def test_every_rank_refuses_to_accumulate_on_sums_also_one_that_sums_nothing():
    assert spawn(accumulated_on_sums, 3) == [True, True, True]
