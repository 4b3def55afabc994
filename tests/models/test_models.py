"""Every model trains in stages as the unsplit one does: loss, each gradient by its original name, each buffer.

Two chunks run through the real lists and executor. `make test` runs each model once, with random operations where it
has any, and two random cuts; `make soak` the whole product, and the further models once.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import plain
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo import Case, further, listed

from stagekit.api import capture_model, plan_pipeline
from stagekit.graph.capture.capture import Captured
from stagekit.graph.cut.layout import lay_out
from stagekit.plan.seeds import chunk_base
from stagekit.testing import LocalResult, run_local

SEED, RATE = 11, 0.25
ROWS = (4, 3)  # of the two chunks: the last one is smaller
CASES = {case.name: case for case in (*listed(), *further())}
LISTED = [case.name for case in listed()]
FURTHER = [case.name for case in further()]
RATES = {name: RATE if case.has_dropout else 0.0 for name, case in CASES.items()}


@functools.lru_cache(maxsize=1)
def prepared(name: str, rate: float) -> tuple[Captured, plain.Result]:
    """Return the capture, and what the unsplit model gives for the same batch and seeds."""
    case = CASES[name]
    args, kwargs = copy.deepcopy((case.args, case.kwargs))
    captured = capture_model(functools.partial(case.build, rate), args, kwargs, seed=SEED)
    model = started(case, rate)
    chunks = [pytree.tree_map_only(Tensor, lambda t, c=c: part(t, c), (args, kwargs)) for c in range(len(ROWS))]
    bases = [chunk_base(SEED, 0, chunk, 0) for chunk in range(len(ROWS))]
    return captured, plain.step(model, chunks, ROWS, plain.reduce, bases)


def started(case: Case, rate: float) -> nn.Module:
    torch.manual_seed(SEED)
    return (case.reference or case.build)(rate)


def part(value: Tensor, chunk: int) -> Tensor:
    """Return one chunk of the batch: the example's rows, then those rows in another order, one less."""
    return value.clone() if chunk == 0 else value.flip(0)[: ROWS[1]].contiguous()


def whole(value: Tensor) -> Tensor:
    return torch.cat([part(value, chunk) for chunk in range(len(ROWS))])


def random_cut(captured: Captured, stages: int, draw: random.Random) -> list[str]:
    layout = lay_out(captured)
    first = next(node.name for node in layout.nodes if node in layout.work)
    return [first, *(layout.nodes[at].name for at in sorted(draw.sample(list(layout.legal), stages - 1)))]


def run(captured: Captured, case: Case, stages: int, at_nodes: list[str] | None, schedule: str = "1f1b") -> LocalResult:
    """Train one step; with 4 stages, in small buckets and recomputing what backward needs."""
    pipe = plan_pipeline(
        captured,
        loss_fn=lambda output, target: plain.reduce(output),
        stages=stages,
        chunks=len(ROWS),
        schedule=schedule,
        split="balanced",
        buckets={"cap": 4096} if stages == 4 else None,
        recompute=stages == 4,
        at_nodes=at_nodes,
        seed=SEED,
    )
    args, kwargs = pytree.tree_map_only(Tensor, whole, (case.args, case.kwargs))
    return run_local(pipe, *args, target=torch.zeros(sum(ROWS)), **kwargs)


@pytest.mark.parametrize("name", LISTED)
def test_a_model_cut_at_random_trains_as_the_unsplit_one(name: str) -> None:
    captured, expected = prepared(name, RATES[name])
    draw = random.Random(name)
    for stages in (2, 4):
        plain.compare(run(captured, CASES[name], stages, random_cut(captured, stages, draw)), expected)


@pytest.mark.soak
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("cut", ["balanced", "random", "another random"])
@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize("name", LISTED)
def test_the_whole_product_of_models_cuts_stages_and_dropout(name: str, rate: float, cut: str, stages: int) -> None:
    if rate and not CASES[name].has_dropout:
        rate = 0.0
    captured, expected = prepared(name, rate)
    at_nodes = None if cut == "balanced" else random_cut(captured, stages, random.Random(f"{name} {cut} {stages}"))
    plain.compare(run(captured, CASES[name], stages, at_nodes), expected)


@pytest.mark.soak
@pytest.mark.parametrize("name", FURTHER)
def test_a_further_model_cut_at_random_trains_as_the_unsplit_one(name: str) -> None:
    test_a_model_cut_at_random_trains_as_the_unsplit_one(name)


def test_the_comparison_notices_a_wrong_seed() -> None:
    """Otherwise equal results with dropout would show nothing."""
    case = CASES["tied with a counter"]
    captured, expected = prepared(case.name, RATE)
    pipe = plan_pipeline(
        captured, loss_fn=lambda output, target: plain.reduce(output), stages=2, chunks=len(ROWS), seed=SEED + 1
    )
    args: Any = pytree.tree_map_only(Tensor, whole, case.args)
    with pytest.raises(AssertionError):
        plain.compare(run_local(pipe, *args, target=torch.zeros(sum(ROWS))), expected)
