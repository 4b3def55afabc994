"""Ranks that each measured something else run the plan of rank 0: its schedule, its cut, its lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stagekit
from stagekit.plan.decision import Decision, decision_of
from stagekit.testing import run_local, spawn

WIDTH, ROWS, CHUNKS = 32, 4, 4


def build() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(ROWS * CHUNKS, WIDTH, generator=generator) for _ in range(2))
    return x, target


def made(**choice: Any) -> stagekit.Pipeline:
    return stagekit.pipeline(build, args=(torch.randn(ROWS, WIDTH),), loss_fn=loss, chunks=CHUNKS, seed=1, **choice)


def trained(rank: int, choice: dict[str, Any]) -> tuple[str, str, float]:
    pipe = made(**choice)
    run = pipe.deploy()
    (x, target), last = batch(), run.plan.stage_ranks[-1]
    args = (x,) if rank == 0 else ()
    result = run.step(*args, target=target if rank == last else None)
    return run.plan.fingerprint, decision_of(run.plan).to_json(), result.loss


CHOICES = [
    {"stages": 2, "schedule": "auto"},
    {"ranks": 2, "stages_per_rank": "auto", "schedule": "auto"},
    {"stages": 4, "stages_per_rank": 2, "schedule": "zb-auto"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=["schedule", "stages_per_rank", "zb-auto"])
def test_all_ranks_run_what_rank_0_decided_on_its_own_measurements(choice: dict[str, Any]) -> None:
    ranks = spawn(trained, 2, choice)
    assert len({told[:2] for told in ranks}) == 1
    x, target = batch()
    torch.manual_seed(1)
    whole = build().requires_grad_(False)
    expected = sum(float(loss(whole(a), b)) for a, b in zip(x.split(ROWS), target.split(ROWS), strict=True)) / CHUNKS
    assert ranks[0][2] == pytest.approx(expected, rel=1e-6)


def test_a_chosen_plan_trains_like_any_other_and_tells_what_it_was_compared_with() -> None:
    pipe = made(ranks=2, stages_per_rank="auto", schedule="auto")
    ranking = pipe.ranking
    assert ranking is not None and ranking.winner.candidate.schedule == pipe.plan.schedule
    assert pipe.plan.timeline.makespan == pytest.approx(ranking.winner.step_s, rel=1e-3)
    assert len(ranking.best) >= 8 and all(each.step_s >= ranking.bound_s for each in ranking.best)
    x, target = batch()
    one = stagekit.pipeline(build, args=(x[:ROWS],), loss_fn=loss, chunks=CHUNKS, seed=1, stages=1)
    assert run_local(pipe, x, target=target).loss == pytest.approx(run_local(one, x, target=target).loss)


def test_a_decision_is_told_without_loss() -> None:
    for choice in CHOICES:
        decision = decision_of(made(**choice).plan)
        assert Decision.from_json(decision.to_json()) == decision
