"""Any graph, cut anywhere, computes what eager computes: hypothesis draws both."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import plain
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_graphs import WIDTH, Instruction, RandomModel, instructions, outputs

from stagekit.api import capture_model, plan_pipeline
from stagekit.graph.cut.layout import lay_out
from stagekit.plan.seeds import chunk_base
from stagekit.testing import run_local

SEED, ROWS, CHUNKS = 5, 3, 2
EACH_TIME_THE_SAME = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False, database=None
)


def in_double(steps: tuple[Instruction, ...], picked: tuple[int, ...]) -> RandomModel:
    """Return the model with 64-bit floats: what remains of a difference is no rounding."""
    return RandomModel(steps, picked, 0.3).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS * CHUNKS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, WIDTH, (ROWS * CHUNKS, WIDTH), generator=generator)


def in_chunks(value: torch.Tensor) -> list[torch.Tensor]:
    return [chunk.clone() for chunk in value.split(ROWS)]


def expected_of(build: Callable[[], RandomModel]) -> plain.Result | None:
    """Return what eager gives, None where eager itself refuses (a write to what backward needs)."""
    torch.manual_seed(SEED)
    model = build()
    x, numbers = batch()
    chunks = [((a, b), {}) for a, b in zip(in_chunks(x), in_chunks(numbers), strict=True)]
    try:
        return plain.step(
            model, chunks, [ROWS] * CHUNKS, plain.reduce, [chunk_base(SEED, 0, chunk, 0) for chunk in range(CHUNKS)]
        )
    except RuntimeError:
        return None


def check(steps: tuple[Instruction, ...], picked: tuple[int, ...], stages: int, draw: random.Random) -> None:
    build = functools.partial(in_double, steps, picked)
    expected = expected_of(build)
    assume(expected is not None)
    assert expected is not None
    x, numbers = batch()
    captured = capture_model(build, (in_chunks(x)[0], in_chunks(numbers)[0]), seed=SEED, check=False)
    layout = lay_out(captured)
    stages = min(stages, len(layout.legal) + 1)
    first = next(node.name for node in layout.nodes if node in layout.work)
    at_nodes = [first, *(layout.nodes[at].name for at in sorted(draw.sample(list(layout.legal), stages - 1)))]
    pipe = plan_pipeline(
        captured,
        loss_fn=lambda output, target: plain.reduce(output),
        stages=stages,
        chunks=CHUNKS,
        at_nodes=at_nodes,
        seed=SEED,
    )
    kept = x.clone()
    got = run_local(pipe, x, numbers, target=torch.zeros(ROWS * CHUNKS))
    assert torch.equal(x, kept), "an input was written"
    plain.compare(got, expected)


@settings(EACH_TIME_THE_SAME, max_examples=25)
@given(instructions, outputs, st.integers(2, 5), st.randoms(use_true_random=False))
def test_a_random_graph_cut_at_random_computes_what_eager_computes(steps, picked, stages, draw):
    check(steps, picked, stages, draw)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(EACH_TIME_THE_SAME, max_examples=1000)
@given(instructions, outputs, st.integers(2, 5), st.randoms(use_true_random=False))
def test_a_thousand_random_graphs_cut_at_random_compute_what_eager_computes(steps, picked, stages, draw):
    check(steps, picked, stages, draw)
