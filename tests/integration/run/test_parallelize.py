"""Stages that `parallelize` changes: FSDP2 and DistributedDataParallel train as the unsplit model does, and fail as it does."""

import functools

import pytest
import torch
from torch import nn

import stagekit
from stagekit.api import capture_model, plan_pipeline
from stagekit.errors import StagekitError, UserError
from stagekit.testing import spawn
from tests.integration.run.parallelized import KINDS, loss, sharded, whole_gradients, wrapped

WIDTH, ROWS, CHUNKS, STEPS = 8, 16, 4, 3
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # → stages per rank


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def valid_rows(target):
    return float((~target.isnan().any(1)).sum())


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(ROWS, WIDTH, generator=generator),
    )


@functools.cache
def captured(precision):
    return capture_model(Model, (torch.zeros(2, WIDTH),), precision=precision)


def pipeline(schedule, parallelize, precision="fp32", **options):
    per_rank = SCHEDULES[schedule]
    stages = 2 * per_rank
    return plan_pipeline(
        captured(precision), loss_fn=loss, stages=stages, chunks=CHUNKS, schedule=schedule, stages_per_rank=per_rank,
        replicas=2, split=[f"layers.{8 * cut // stages}" for cut in range(1, stages)], measured=False,
        parallelize=parallelize, **options,
    )  # fmt: skip


def half(tensor, run):
    return tensor[run.replica * ROWS // 2 : (run.replica + 1) * ROWS // 2]


def step(run, number):
    x, target = batch(number)
    return run.step(half(x, run), target=half(target, run)).loss


def trained(rank):
    """Train each kind under each schedule: two accumulated batches a step, clipping; also a step that fails."""
    results = {}
    for kind in KINDS:
        for schedule in SCHEDULES:
            run = pipeline(schedule, KINDS[kind]).deploy()
            optimizer = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
            for number in range(STEPS):
                with run.no_sync():
                    step(run, 2 * number)
                step(run, 2 * number + 1)
                assert all((p.grad is None) == name.startswith("unused") for name, p in run.named_parameters())
                norm = run.clip_grad_norm_(0.2)
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    x, target = batch(9)
                    target[ROWS - 1] = 99.0  # the second replica's last chunk
                    with pytest.raises(StagekitError, match="a target beyond reach"):
                        run.step(half(x, run), target=half(target, run))
            results[kind, schedule] = norm, run.state_dict()
    return results


def test_sharded_and_wrapped_stages_train_as_the_unsplit_model_and_survive_a_failed_step():
    ranks = spawn(trained, 4, timeout_s=240.0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        for each in (2 * number, 2 * number + 1):
            x, target = batch(each)
            loss(model(x), target).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    for key in ranks[0]:
        got = ranks[0][key][1] | ranks[1][key][1]
        again = ranks[2][key][1] | ranks[3][key][1]
        assert ranks[0][key][0] == pytest.approx(float(norm), rel=1e-5), key
        for name, value in model.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6, msg=f"{key} {name}")
            assert torch.equal(got[name], again[name]), (key, name)


def zeroed_between(run):
    """Return the gradients of a step after one without synchronisation whose gradients were dropped, both ways."""
    found = []
    for zero in (run.zero_grad, torch.optim.SGD(run.parameters()).zero_grad):
        with run.no_sync():
            step(run, 1)
        optimizer = torch.optim.SGD(run.parameters(), lr=1.0)  # made now, it trains what others would
        zero()
        step(run, 0)
        found.append(whole_gradients(run))
        before = {name: value.clone() for name, value in run.state_dict().items()}
        optimizer.step()
        trained = [not torch.equal(value, before[name]) for name, value in run.state_dict().items() if "layers" in name]
        assert all(trained)
        run.load_state_dict(before)
        run.zero_grad()
    return found


def scales(run, *, infinite_on):
    """Return the scale after a step with one infinite gradient on that rank, and after the next; and whether weights moved."""
    optimizer, scaler = torch.optim.SGD(run.parameters(), lr=0.1), stagekit.GradScaler(run)
    found = []
    for number in range(2):
        before = run.state_dict()
        step(run, number)
        if number == 0 and run.groups.global_rank == infinite_on:
            next(run.parameters()).grad.to_local().view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(value, before[name]) for name, value in run.state_dict().items())
        found.append((scaler.get_scale(), moved))
    return found


def evaluated(run):
    """Score a batch before a step, between two accumulated ones, and after it; each time in shards or gathered."""
    x, target = batch(7)
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    found = []

    def score():
        found.append(run.eval(half(x, run), target=half(target, run)).loss)

    score()
    with run.no_sync():
        step(run, 0)
        score()
        step(run, 1)
    step(run, 2)
    score()
    optimizer.step()
    score()
    held = sum(parameter.numel() for copy in run._whole_copies for parameter in copy.module.parameters())
    return found, held


def odd(rank):
    """A last chunk that weighs nothing on one replica; loading; an overflow in one shard; what is refused."""
    results = {}
    for kind in KINDS:
        run = pipeline("1f1b", KINDS[kind], loss_weight=valid_rows).deploy()
        x, target = batch(0)
        target[-2:] = float("nan")
        run.step(half(x, run), target=half(target, run))
        whole = {name: value * 2 for name, value in run.state_dict().items()}
        run.load_state_dict(whole)
        assert all(torch.equal(value, whole[name]) for name, value in run.state_dict().items())
        results[kind] = whole_gradients(run)
        results[kind, "zeroed"] = zeroed_between(pipeline("1f1b", KINDS[kind]).deploy())
    run = pipeline("1f1b", sharded, "fp16").deploy()
    results["fp16"] = scales(run, infinite_on=3)
    results["eval"] = evaluated(pipeline("1f1b", sharded).deploy())
    with pytest.raises(UserError, match="parallelize returned a Sequential"):
        pipeline("1f1b", lambda module, mesh: nn.Sequential(module)).deploy()
    with pytest.raises(StagekitError, match="that don't hold the same stage; give it process_group="):
        pipeline("1f1b", lambda module, mesh: nn.parallel.DistributedDataParallel(module)).deploy()
    for option in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
        with pytest.raises(UserError, match=f"DistributedDataParallel with {option}=True; leave it out"):
            pipeline("1f1b", functools.partial(wrapped, **{option: True})).deploy()
    return results


def check_scores(ranks):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = batch(7)
    before = loss(model(x), target).item()
    for number in range(3):
        loss(model(batch(number)[0]), batch(number)[1]).backward()
    optimizer.step()
    expected = [before, before, before, loss(model(x), target).item()]
    assert all(found == pytest.approx(expected, rel=1e-6) and held == 0 for found, held in ranks), ranks


def test_chunks_without_weight_are_left_out_overflows_skip_everywhere_and_other_wrappers_are_refused():
    ranks = spawn(odd, 4)
    model = Model()
    x, target = batch(0)
    loss(model(x)[:-2], target[:-2]).backward()
    assert all(rank["fp16"] == [(32768.0, False), (32768.0, True)] for rank in ranks)
    check_scores([rank["eval"] for rank in ranks])
    for kind in KINDS:
        got = ranks[0][kind] | ranks[1][kind]
        for name, parameter in model.layers.named_parameters(prefix="layers"):
            torch.testing.assert_close(got[name], parameter.grad, msg=f"{kind} {name}")
    model = Model()
    loss(model(x), batch(0)[1]).backward()
    for kind in KINDS:
        for number in range(2):
            got = ranks[0][kind, "zeroed"][number] | ranks[1][kind, "zeroed"][number]
            for name, parameter in model.layers.named_parameters(prefix="layers"):
                torch.testing.assert_close(got[name], parameter.grad, msg=f"{kind} {name}")
