"""A hand-made chain of stages in one thread: losses, gradients and what is held, against the unsplit chain."""

import pytest
import torch
from torch import nn

import stagekit
from stagekit.errors import ShapeError, StageError
from stagekit.plan.plan import make_plan
from stagekit.run.lane import RunOptions
from stagekit.run.local import LocalRun
from stagekit.run.transport import BufferPool
from stagekit.testing import ChainSource, InProcessTransport, Mailbox, run_local

WIDTH = 8


def modules(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def local(stages, *, schedule="1f1b", chunks=4, loss=mean_square, weight=None, recompute=False):
    source = ChainSource(stages, WIDTH, 2)
    per_rank = 1
    plan = make_plan(source.spec, schedule=schedule, num_chunks=chunks, stages_per_rank=per_rank, recompute=recompute)
    mailbox = Mailbox()
    return LocalRun(source, plan, RunOptions(loss, weight, 0), lambda rank: InProcessTransport(rank, mailbox))


def unsplit(stages, x, target, chunks, weight=len):
    model = nn.Sequential(*stages)
    xs, targets = x.tensor_split(chunks), target.tensor_split(chunks)
    total = sum(weight(t) for t in targets)
    loss_sum = 0.0
    for xc, tc in zip(xs, targets, strict=True):
        loss = mean_square(model(xc), tc)
        loss.backward(torch.tensor(weight(tc) / total))
        loss_sum += weight(tc) * float(loss.detach())
    return loss_sum / total, {name: p.grad for name, p in model.named_parameters()}


def batch(rows):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_equal_the_unsplit_model_bit_for_bit(schedule, count, recompute):
    stages = modules(count)
    x, target = batch(8)
    run = local(stages, schedule=schedule, recompute=recompute)
    loss, output = run.step((x,), {}, target)
    expected, gradients = unsplit(stages, x, target, 4)
    assert loss == expected
    assert output.shape == (8, WIDTH)
    for name, gradient in run.gradients().items():
        assert torch.equal(gradient, gradients[name]), name


def test_uneven_chunks_are_weighted_by_their_rows():
    stages = modules(2)
    x, target = batch(10)  # in 4 chunks: 3, 3, 2, 2
    run = local(stages)
    loss, _ = run.step((x,), {}, target)
    assert loss == pytest.approx(float(mean_square(nn.Sequential(*stages)(x), target)), rel=1e-6)


ORDERS = {
    "backwards first": "0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n",
    "forward only": "0F1,0F0\n1F1,1F0\n",
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_schedule_may_run_the_chunks_in_any_order_and_outputs_and_losses_stay_with_their_rows(tmp_path, order):
    (tmp_path / "mine.csv").write_text(ORDERS[order])
    stages = modules(2)
    x, target = batch(5)  # in 2 chunks: 3, 2
    run = local(stages, schedule=str(tmp_path / "mine.csv"), chunks=2)
    loss, output = run.step((x,), {}, target)
    expected = nn.Sequential(*stages)(x).detach()
    torch.testing.assert_close(output, expected)
    assert loss == pytest.approx(float(mean_square(expected, target)), rel=1e-6)
    parts = [mean_square(*chunk) for chunk in zip(expected.split([3, 2]), target.split([3, 2]), strict=True)]
    torch.testing.assert_close(run._loss.losses, parts)


def test_two_steps_without_zeroing_add_up():
    stages = modules(2)
    x, target = batch(8)
    run = local(stages)
    run.step((x,), {}, target)
    once = {name: g.clone() for name, g in run.gradients().items()}
    run.step((x,), {}, target)
    for name, gradient in run.gradients().items():
        torch.testing.assert_close(gradient, 2 * once[name])


def test_a_chunk_of_weight_zero_adds_nothing_even_when_its_loss_is_not_a_number():
    stages = modules(2)
    x, target = batch(8)
    target[2:4] = float("nan")
    run = local(stages, weight=lambda t: 0.0 if bool(t.isnan().any()) else float(len(t)))
    loss, _ = run.step((x,), {}, target)
    keep = torch.tensor([0, 1, 4, 5, 6, 7])
    assert loss == pytest.approx(float(mean_square(nn.Sequential(*stages)(x[keep]), target[keep])), rel=1e-6)
    assert all(bool(g.isfinite().all()) for g in run.gradients().values())


def test_a_smaller_or_larger_next_batch_is_just_another_batch():
    stages = modules(3)
    run = local(stages)
    for rows in (8, 4, 13):
        x, target = batch(rows)
        loss, output = run.step((x,), {}, target)
        assert output.shape == (rows, WIDTH)
        assert loss == pytest.approx(float(mean_square(nn.Sequential(*stages)(x), target)), rel=1e-6)


def test_fewer_rows_than_chunks_are_refused_before_any_compute():
    run = local(modules(2))
    x, target = batch(3)
    with pytest.raises(ShapeError, match="3 rows can't be split into 4 chunks"):
        run.step((x,), {}, target)


def test_a_chunk_of_fewer_rows_than_the_model_takes_is_refused_with_the_batch_that_would_do():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    pipe = stagekit.pipeline(model, (torch.randn(3, WIDTH),), loss_fn=mean_square, stages=1, chunks=4)
    x, target = batch(5)
    told = r"5 rows in 4 chunks make a chunk of 1, .* for 2..∞ rows .*; give at least 8 rows or fewer chunks"
    with pytest.raises(ShapeError, match=told):
        run_local(pipe, x, target=target)


def test_a_batch_without_rows_is_refused_with_the_number_that_would_do():
    x, target = batch(0)
    with pytest.raises(ShapeError, match="a batch of 0 rows: there is nothing to compute; give at least 4, one per"):
        local(modules(2)).step((x,), {}, target)


def test_an_exception_in_a_stage_names_rank_stage_chunk_and_op():
    class Breaks(nn.Module):
        def forward(self, x):
            raise RuntimeError("boom")

    run = local([modules(1)[0], Breaks()])
    with pytest.raises(StageError, match=r"rank 1, stage 1, chunk 0, F: RuntimeError: boom") as caught:
        run.step((batch(8)[0],), {}, batch(8)[1])
    assert (caught.value.rank, caught.value.stage, caught.value.chunk) == (1, 1, 0)


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape():
    run = local(modules(2), loss=lambda output, target: output)
    with pytest.raises(StageError, match=r"returned \(2, 8\); it must return a scalar"):
        run.step((batch(8)[0],), {}, batch(8)[1])


def test_batches_of_ever_new_sizes_leave_no_buffers_behind():
    pool = BufferPool(torch.device("cpu"))
    most = 0
    for length in range(1, 61):
        pool.begin_step()
        buffers = [pool.take(((2, length), (length, 1), torch.float32)) for _ in range(2)]
        most = max(most, pool.num_buffers)
        for buffer in buffers:
            pool.give(buffer)
    assert most == pool.num_buffers == 2 * (1 + BufferPool.KEPT_STEPS)


def test_a_size_that_comes_every_few_steps_finds_its_buffer_again():
    pool, seen = BufferPool(torch.device("cpu")), set()
    for step in range(12):
        pool.begin_step()
        length = 1 + step % BufferPool.KEPT_STEPS
        buffer = pool.take(((2, length), (length, 1), torch.float32))
        seen.add(buffer.tensor.data_ptr())
        pool.give(buffer)
    assert len(seen) == pool.num_buffers == BufferPool.KEPT_STEPS


@pytest.mark.parametrize("weight", [None, "sum"])
def test_a_scalar_output_is_averaged_over_rows_also_where_losses_are_added(weight):
    class WithMean(nn.Module):
        def forward(self, x):
            return x, (x * x).mean()

    def squares(output, target):
        return ((output[0] - target) ** 2).sum()

    pipe = stagekit.pipeline(
        nn.Sequential(*modules(2), WithMean()), (batch(3)[0],), loss_fn=squares, loss_weight=weight, stages=2, chunks=2,
        split=["1"],
    )  # fmt: skip
    x, target = batch(5)
    result = run_local(pipe, x, target=target)
    assert float(result.output[1]) == pytest.approx(float((result.output[0] ** 2).mean()), rel=1e-6)
