"""Every schedule trains a model as the unsplit one does, and those of equal accumulation order to the same bit.

The halves of a backward are compared with whole ones, on every listed model in `make soak`.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import plain
import pytest
import torch
from test_models import CASES, LISTED, RATES, SEED, prepared, random_cut, run
from torch import Tensor, nn

from stagekit.api import capture_model, plan_pipeline
from stagekit.graph.capture.capture import Captured
from stagekit.plan.seeds import chunk_base
from stagekit.testing import LocalResult, run_local

CHUNKS = 6
ONE_STAGE = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-auto")
SEVERAL = ("gpipe", "interleaved", "bfs", "zb-v", "v-half")
OTHER_ORDER = ("dualpipe-v",)  # two chunks of different ends alternate, so gradients are added in another order


class Mixed(nn.Module):
    """What the halves of a backward tell apart: layers alone, used twice, tied, of a convolution, unused, frozen; weights
    that are vectors or complex, and a convolution of one image without a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 16)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.twice, self.norm, self.unused = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.vector, self.turn = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat) / 8)
        self.image = nn.Conv2d(2, 2, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.blocks[3].weight.requires_grad_(False)
        self.blocks[5].weight = self.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).relu()
        h = h + self.convolution(h)
        for block in self.blocks:
            h = self.norm(h + self.drop(block(h)).tanh())
        h = h + nn.functional.linear(h, self.vector).unsqueeze(-1)
        h = h + torch.view_as_real(
            nn.functional.linear(torch.view_as_complex(h.unflatten(-1, (8, 2))), self.turn)
        ).flatten(-2)
        h = h + self.image(h.flatten(0, 1).unflatten(1, (2, 8)).transpose(0, 1)).transpose(0, 1).reshape(h.shape)
        return self.twice(self.twice(h).tanh())


@functools.cache
def mixed() -> tuple[Captured, Tensor, plain.Result]:
    x = torch.randn(2 * CHUNKS - 1, 4, 12)
    model_inputs = x[:2].clone()
    captured = capture_model(Mixed, (model_inputs,), seed=SEED)
    torch.manual_seed(SEED)
    chunks = [((part,), {}) for part in x.split(2)]
    bases = [chunk_base(SEED, 0, chunk, 0) for chunk in range(CHUNKS)]
    return captured, x, plain.step(Mixed(), chunks, [len(part) for part in x.split(2)], plain.reduce, bases)


@functools.cache
def trained(schedule: str, per_rank: int, recompute: bool = False) -> LocalResult:
    captured, x, _ = mixed()
    pipe = plan_pipeline(
        captured,
        loss_fn=lambda output, target: plain.reduce(output),
        stages=4,
        stages_per_rank=per_rank,
        chunks=CHUNKS,
        schedule=schedule,
        split="layers",
        recompute=recompute,
        seed=SEED,
    )
    return run_local(pipe, x, target=torch.zeros(len(x)))


def same_bits(one: LocalResult, other: LocalResult) -> bool:
    return one.grads.keys() == other.grads.keys() and all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in ((one.grads[name], other.grads[name]) for name in one.grads)
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("schedule", "per_rank"), [*((s, 1) for s in ONE_STAGE), *((s, 2) for s in (*SEVERAL, *OTHER_ORDER))]
)
def test_every_schedule_trains_as_the_unsplit_model(schedule: str, per_rank: int, recompute: bool) -> None:
    result = trained(schedule, per_rank, recompute)
    plain.compare(result, mixed()[2])
    if schedule not in OTHER_ORDER:
        assert same_bits(result, trained("gpipe", 1))


def test_a_loss_that_trains_something_itself_does_so_under_halved_backwards() -> None:
    captured, x, _ = mixed()
    seen = {}
    for schedule in ("gpipe", "zb-h1"):
        scale = nn.Parameter(torch.tensor(2.0))
        pipe = plan_pipeline(
            captured,
            loss_fn=lambda output, target, scale=scale: (output * scale).square().mean(),
            stages=4,
            chunks=CHUNKS,
            schedule=schedule,
            split="layers",
            seed=SEED,
        )
        run_local(pipe, x, target=torch.zeros(len(x)))
        seen[schedule] = scale.grad
    assert seen["gpipe"] is not None and torch.equal(seen["gpipe"], seen["zb-h1"])


@pytest.mark.soak
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", LISTED)
def test_the_halves_of_a_backward_are_the_whole_to_the_bit(name: str, stages: int) -> None:
    captured, expected = prepared(name, RATES[name])
    at_nodes: Any = random_cut(captured, stages, random.Random(f"{name}{stages}"))
    result = run(captured, CASES[name], stages, at_nodes, "zb-h1")
    plain.compare(result, expected)
    assert same_bits(result, run(captured, CASES[name], stages, at_nodes, "gpipe"))
