"""What the four real processes of test_processes.py do, one after the other. Every function runs on every rank and
returns plain data; the assertions are in the test module."""

import torch
import torch.distributed as dist
from torch import nn

from stagekit import api
from stagekit.errors import StagekitError, UserError
from stagekit.plan.plan import make_plan
from stagekit.run.lane import RunOptions
from stagekit.run.runtime import Run
from stagekit.testing import ChainSource

WIDTH, ROWS, CHUNKS = 8, 12, 4


def modules(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def batch(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def plain_loop(model, x, target, chunks, mask=None):
    """Return the loss and gradients of the unsplit model over the same chunks, in their order."""
    total = 0.0
    masks = [()] * chunks if mask is None else [(m,) for m in mask.tensor_split(chunks)]
    for xc, tc, more in zip(x.tensor_split(chunks), target.tensor_split(chunks), masks, strict=True):
        loss = mean_square(model(xc, *more), tc)
        loss.backward(torch.tensor(len(xc) / len(x)))
        total += len(xc) * float(loss.detach())
    return total / len(x), {name: p.grad for name, p in model.named_parameters()}


def chain_run(count, schedule, group, *, replicas=1):
    source = ChainSource(modules(count), WIDTH, ROWS // CHUNKS)
    plan = make_plan(source.spec, schedule=schedule, num_chunks=CHUNKS, replicas=replicas)
    return Run(source, plan, RunOptions(mean_square, None, 0), torch.device("cpu"), group)


def gradients(run):
    return {name: p.grad.clone() for name, p in run.named_parameters()}


# ---- scenarios


def only_rank_0_passes(count, schedule, group):
    run = chain_run(count, schedule, group)
    x, target = batch()
    for _ in range(2):  # the second step finds buffers and receives as the first one left them
        run.zero_grad()
        loss = (run.step(x, target=target) if run.rank == 0 else run.step()).loss
    (runner,) = run._runners.values()
    return {
        "loss": loss,
        "grads": gradients(run),
        "peak": (runner.peak_chunks, run.plan.timeline.peak_chunks[run.rank]),
        "buffers": run.executor.pool.num_buffers,
        "lists": [str(action) for action in run.executor.recorder.actions],
    }


def two_replicas():
    run = chain_run(2, "1f1b", None, replicas=2)
    x, target = (half.chunk(2)[run.replica] for half in batch(2 * ROWS))
    loss = (run.step(x, target=target) if run.rank == 0 else run.step()).loss
    return {"loss": loss, "grads": gradients(run)}


def wrong_world():
    try:
        chain_run(3, "1f1b", None)
    except UserError as error:
        return str(error)
    return ""


def subgroup(rank):
    """Global ranks 3 and 1 of four."""
    group = dist.new_group([3, 1])
    return only_rank_0_passes(2, "1f1b", group) if rank in (1, 3) else None


def small_model():
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def stage_by_hand(group):
    pipe = api.pipeline(small_model(), (torch.randn(3, WIDTH),), loss_fn=mean_square, stages=2, chunks=CHUNKS)
    rank = dist.get_rank(group)
    stage = api.PipelineStage(pipe, rank, group=group)
    x, target = batch()
    stage.begin(*((x,) if rank == 0 else ()), target=target if rank == 1 else None)
    for chunk in range(CHUNKS):
        stage.forward_one_chunk(chunk)
    for chunk in range(CHUNKS):
        stage.backward_one_chunk(chunk)
    result = stage.end()
    grads = gradients(stage.run)
    norm = stage.run.clip_grad_norm_(0.05)
    return {"loss": result.loss, "grads": grads, "norm": norm, "clipped": gradients(stage.run)}


class Masked(nn.Module):
    """Needs `x` where it begins and `mask` where it ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return self.last(torch.tanh(self.first(x))) * mask


def mask():
    return (torch.arange(ROWS * WIDTH) % 3 > 0).float().view(ROWS, WIDTH)


def each_rank_passes_its_own(group):
    example = (torch.randn(3, WIDTH), torch.ones(3, WIDTH))
    pipe = api.pipeline(Masked(), example, loss_fn=mean_square, stages=2, chunks=CHUNKS, split=["last"])
    run = pipe.deploy(group=group)
    x, target = batch()
    result = run.step(x, None) if run.rank == 0 else run.step(None, mask(), target=target)
    return {"loss": result.loss, "grads": gradients(run)}


def forgets_an_argument(group):
    """Rank 0 leaves its batch out of the second step: refused on both, and the third step runs."""
    run = chain_run(2, "1f1b", group)
    x, target = batch()
    given = [((x,), target), ((), target), ((x,), target)]
    texts = []
    for args, aim in given:
        try:
            texts.append(run.step(*args, target=aim).loss if run.rank == 0 else run.step().loss)
        except StagekitError as error:
            texts.append(str(error))
    return texts


def everything(rank):
    """Run every scenario; pairs of ranks do the two-stage ones."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, world = pairs[rank // 2], dist.group.WORLD
    return {
        "2 1f1b": only_rank_0_passes(2, "1f1b", mine),
        "2 gpipe": only_rank_0_passes(2, "gpipe", mine),
        "4 1f1b": only_rank_0_passes(4, "1f1b", world),
        "4 gpipe": only_rank_0_passes(4, "gpipe", world),
        "replicas": two_replicas(),
        "wrong world": wrong_world(),
        "subgroup": subgroup(rank),
        "forgets": forgets_an_argument(mine),
        "by hand": stage_by_hand(mine) if rank < 2 else None,
        "own arguments": each_rank_passes_its_own(mine) if rank < 2 else None,
    }


def fails_in_stage_1(rank):
    source = ChainSource([modules(1)[0], Breaks()], WIDTH, 1)
    plan = make_plan(source.spec, schedule="1f1b", num_chunks=2)
    run = Run(source, plan, RunOptions(mean_square, None, 0), torch.device("cpu"), None)
    x, target = batch(2)
    run.step(x, target=target)


class Breaks(nn.Module):
    def forward(self, x):
        raise RuntimeError("boom")
