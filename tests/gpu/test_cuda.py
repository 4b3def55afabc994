"""What one CUDA device can show: several stages on one rank, compiled, in bf16, timed by events. Skipped without one."""

import itertools

import pytest
import torch
from torch import nn

import stagekit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH, ROWS, CHUNKS = 512, 64, 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def loss(output, target):
    return ((output.float() - target.float()) ** 2).mean()


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, WIDTH, generator=generator).to("cuda", dtype) for _ in range(2))


def deploy(**options):
    dtype = options.pop("dtype", torch.float32)
    pipe = stagekit.pipeline(
        lambda: model().to(dtype), args=(torch.zeros(ROWS // CHUNKS, WIDTH, dtype=dtype, device="cuda"),), loss_fn=loss,
        stages=4, chunks=CHUNKS, stages_per_rank=4, device="cuda", **options,
    )  # fmt: skip
    return pipe.deploy("cuda")


def gradients(dtype=torch.float32):
    whole = model().to("cuda", dtype)
    x, target = batch(dtype)
    loss(whole(x), target).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


@pytest.mark.parametrize("schedule", ["gpipe", "bfs", "zb-auto"])
def test_four_stages_on_one_device_have_the_gradients_of_the_unsplit_model(schedule):
    run = deploy(schedule=schedule)
    x, target = batch()
    run.step(x, target=target)
    for name, expected in gradients().items():
        torch.testing.assert_close(dict(run.named_parameters())[name].grad, expected, rtol=1e-4, atol=1e-6)


def test_compiled_stages_have_them_too():
    run = deploy(schedule="gpipe", compile="inductor")
    x, target = batch()
    run.step(x, target=target)
    for name, expected in gradients().items():
        torch.testing.assert_close(dict(run.named_parameters())[name].grad, expected, rtol=1e-3, atol=1e-5)


def test_bf16_stages_have_them_within_its_precision():
    run = deploy(schedule="gpipe", dtype=torch.bfloat16)
    x, target = batch(torch.bfloat16)
    run.step(x, target=target)
    for name, expected in gradients(torch.bfloat16).items():
        torch.testing.assert_close(dict(run.named_parameters())[name].grad, expected, rtol=5e-2, atol=1e-4)


def test_times_are_the_devices_not_those_of_the_launches():
    run = deploy(schedule="gpipe")
    events = []
    run.on_action(lambda rank, stage, chunk, op, t0, t1: events.append((op, t0, t1)))
    x, target = batch()
    run.step(x, target=target)
    compute = [(t0, t1) for op, t0, t1 in events if op in ("F", "B")]
    assert len(compute) == 2 * 4 * CHUNKS
    assert all(t1 > t0 for t0, t1 in compute)
    assert all(b[0] >= a[1] for a, b in itertools.pairwise(compute))  # one stream: one after the other
