"""Pipelines of replicas train as one process does on the whole batch, under every kind of schedule.

Four real processes, started once, run all cases one after the other: stages × replicas of 4, with and without ties,
clipping, accumulation, loss scaling with an infinite gradient on one rank only, weights sharded over replicas by FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stagekit
from stagekit.api import capture_model, plan_pipeline
from stagekit.graph.capture.capture import Captured
from stagekit.testing import spawn
from tests.integration.run.parallelized import sharded

STEPS, ROWS, CHUNKS, LENGTH, WORDS, WIDTH, BLOCKS = 5, 32, 4, 6, 24, 16, 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # → stages per rank
SHAPES = {"pp2 x dp2": (2, 2), "pp4 x dp1": (4, 1), "pp1 x dp4": (1, 4)}
OPTIONS = ("plain", "ties", "clipping", "accumulation", "loss scaling")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Words [rows, length] → scores [rows, length, words]."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)  # else tied scores are so large that rounding errors grow
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    shape: str
    schedule: str
    option: str
    sharded: bool = False  # by fully_shard

    @property
    def tied(self) -> bool:
        return self.option == "ties"


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, target = (torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return x, target


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def alone(option: str) -> dict[str, Tensor]:
    """Train the unsplit model in this process on whole batches."""
    model = Model(tied=option == "ties")
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        for number in numbers(option, step):
            loss(model(batch(number)[0]), batch(number)[1]).backward()  # type: ignore[no-untyped-call]
        if option == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if not (option == "loss scaling" and step == 1):
            optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def numbers(option: str, step: int) -> range:
    return range(2 * step, 2 * step + 2) if option == "accumulation" else range(step, step + 1)


def train(run: Any, option: str) -> None:
    optimizer = optimizer_of(run.parameters())
    scaler = stagekit.GradScaler(run, init_scale=256.0) if option == "loss scaling" else None
    rows = ROWS // run.plan.replicas
    own = slice(run.replica * rows, (run.replica + 1) * rows)
    for step in range(STEPS):
        *first, last = numbers(option, step)
        for number in first:
            with run.no_sync():
                run.step(batch(number)[0][own], target=batch(number)[1][own])
        run.step(batch(last)[0][own], target=batch(last)[1][own])
        if option == "clipping":
            run.clip_grad_norm_(0.3)
        if scaler is None:
            optimizer.step()
        else:
            if step == 1 and run.groups.global_rank == 3:
                gradient = next(run.parameters()).grad
                getattr(gradient, "to_local", lambda own=gradient: own)().view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (256.0 if step < 1 else 128.0)
        optimizer.zero_grad()


def pipelines(rank: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    """Train every case; return this rank's weights after each."""
    captured: dict[bool, Captured] = {}
    weights = []
    for case in cases:
        stages_per_rank = SCHEDULES[case.schedule]
        ranks, replicas = SHAPES[case.shape]
        stages = ranks * stages_per_rank
        rows = ROWS // replicas // CHUNKS
        if case.tied not in captured:
            example = (batch(0)[0][:rows],)
            captured[case.tied] = capture_model(lambda tied=case.tied: Model(tied=tied), example)  # type: ignore[misc]
        pipe = plan_pipeline(
            captured[case.tied],
            loss_fn=loss,
            stages=stages,
            chunks=CHUNKS,
            schedule=case.schedule,
            stages_per_rank=stages_per_rank,
            replicas=replicas,
            split=[f"blocks.{BLOCKS * cut // stages}" for cut in range(1, stages)],
            buckets={"cap": 4096, "first": 1024},
            measured=False,
            parallelize=sharded if case.sharded else None,
        )
        run = pipe.deploy()
        train(run, case.option)
        weights.append({name: value.detach().clone() for name, value in run.state_dict().items()})
    return weights


def check(cases: list[Case]) -> None:
    """Run the cases; compare the weights with one process', and those of replicas with each other."""
    expected = {option: alone(option) for option in {case.option for case in cases}}
    ranks = spawn(pipelines, 4, cases, timeout_s=600.0)
    for index, case in enumerate(cases):
        num_ranks, replicas = SHAPES[case.shape]
        each = [ranks[r * num_ranks : (r + 1) * num_ranks] for r in range(replicas)]
        whole = [{name: t for rank in row for name, t in rank[index].items()} for row in each]
        for name, value in expected[case.option].items():
            torch.testing.assert_close(whole[0][name], value, rtol=1e-6, atol=1e-6, msg=f"{case} {name}")
            assert all(torch.equal(whole[0][name], other[name]) for other in whole), (case, name)


def every_case() -> list[Case]:
    plain = [Case(shape, schedule, option) for shape in SHAPES for schedule in SCHEDULES for option in OPTIONS]
    options = ("plain", "clipping", "loss scaling")
    return plain + [Case("pp2 x dp2", schedule, option, sharded=True) for schedule in SCHEDULES for option in options]


def test_a_sample_of_replicas_train_as_one_process() -> None:
    # Every option and every schedule with pp2 x dp2, every shape with two schedules.
    cases = [Case("pp2 x dp2", *pair) for pair in zip(SCHEDULES, OPTIONS, strict=True)]
    cases += [Case("pp4 x dp1", "interleaved", "ties"), Case("pp4 x dp1", "zb-h1", "clipping")]
    cases += [Case("pp1 x dp4", "1f1b", "accumulation"), Case("pp1 x dp4", "zb-v", "loss scaling")]
    cases += [Case("pp2 x dp2", "zb-v", "clipping", sharded=True)]
    check(cases)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_replicas_train_as_one_process() -> None:
    check(every_case())
