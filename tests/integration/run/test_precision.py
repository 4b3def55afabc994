"""Half precision: stages compute, to the bit, what torch.autocast around the unsplit model computes."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stagekit
from stagekit.api import capture_model, plan_pipeline
from stagekit.testing import run_local

WIDTH, ROWS, CHUNKS, BLOCKS = 16, 16, 4, 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "zb-v": 2}  # → stages per rank


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):  # a region of the model's own stays
            x = self.norm(x.float())
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.enter.weight.t()[:, :3]


def loss(output, target):
    return F.cross_entropy(output, target)


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)


@functools.cache
def captured(precision):
    return capture_model(Model, (batch()[0][: ROWS // CHUNKS],), precision=precision)


def pipeline(precision, schedule="1f1b", **options):
    stages = 2 * SCHEDULES[schedule]
    return plan_pipeline(
        captured(precision), loss_fn=loss, stages=stages, chunks=CHUNKS, schedule=schedule,
        stages_per_rank=SCHEDULES[schedule], measured=False,
        split=[f"blocks.{BLOCKS * cut // stages}" for cut in range(1, stages)], **options,
    )  # fmt: skip


@functools.cache
def unsplit(precision):
    """Return loss and gradients of the plain model, chunk by chunk under autocast."""
    model, total = Model(), 0.0
    for x, target in zip(*(value.chunk(CHUNKS) for value in batch()), strict=True):
        with torch.autocast("cpu", DTYPES[precision]):
            each = loss(model(x), target)
        each.backward(torch.tensor(1 / CHUNKS))
        total += each.item() / CHUNKS
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", DTYPES)
def test_stages_compute_what_autocast_around_the_model_computes(precision, schedule):
    pipe = pipeline(precision, schedule)
    x, target = batch()
    got = run_local(pipe, x, target=target)
    expected, gradients = unsplit(precision)
    assert got.loss == pytest.approx(expected, rel=1e-7)
    tied = "enter.weight"  # autocast casts it once for both of its uses, stages each use for itself
    assert [name for name, value in gradients.items() if name != tied and not torch.equal(got.grads[name], value)] == []
    torch.testing.assert_close(got.grads[tied], gradients[tied], rtol=2e-2, atol=1e-3)


def test_a_layers_output_crosses_a_cut_in_half_the_bytes():
    for precision, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        pipe = plan_pipeline(
            captured(precision), loss_fn=loss, stages=2, chunks=CHUNKS, split=["blocks.0"], measured=False
        )
        assert [edge.tensor.dtype for edge in pipe.plan.model.edges] == [dtype]


def test_recomputed_stages_compute_in_the_same_precision():
    x, target = batch()
    plain = run_local(pipeline("bf16"), x, target=target)
    again = run_local(pipeline("bf16", recompute=True), x, target=target)
    assert all(torch.equal(value, plain.grads[name]) for name, value in again.grads.items())


def test_evaluation_is_of_the_same_precision_and_parameters_keep_names_type_and_copies():
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    x, target = batch()
    pipe = stagekit.pipeline(
        model, (x[: ROWS // CHUNKS],), loss_fn=loss, stages=1, chunks=CHUNKS, split="parameters", precision="bf16"
    )
    assert type(model) is Model and [name for name, _ in copy.deepcopy(model).named_parameters()] == names
    run = pipe.deploy()
    assert [name for name, _ in run.named_parameters()] == names
    assert {parameter.dtype for parameter in run.parameters()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model.eval()(x)
    got = run.eval(x, target=target)
    assert got.output.dtype == expected.dtype
    torch.testing.assert_close(got.output, expected)
