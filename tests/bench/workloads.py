"""What each process of the pipeline benchmark runs and times. Every function is called on all ranks by stagekit.testing.spawn.

Sides alternate block by block in the same processes. Decides what is measured and in which order; what a number means,
and its goal, is in tests/bench/pipeline.py.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import stagekit
from piped.worker.link import Link
from piped.worker.observe import Observer
from piped.worker.position import Position
from stagekit.examples.gpt import GPT
from stagekit.plan.lowering import routes_of
from stagekit.plan.timeline import simulate
from stagekit.run.allocator import keep_freed_memory
from stagekit.run.lane import StepResult
from stagekit.run.runtime import Run
from tests.bench.sides import (
    STAGES_PER_RANK,
    TINY,
    Bare,
    Ours,
    Shape,
    SleepStage,
    Torch,
    batch,
    count_calls,
    own_stages,
    tiny_stages,
)

TRANSPORTS = ("gloo", "shm")
Block = tuple[float, float]  # wall and main-thread CPU seconds per step


@contextmanager
def over(transport: str) -> Iterator[None]:
    """Whatever is deployed inside uses that transport."""
    before = os.environ.get("STAGEKIT_TRANSPORT")
    os.environ["STAGEKIT_TRANSPORT"] = transport
    try:
        yield
    finally:
        os.environ.pop("STAGEKIT_TRANSPORT")
        if before is not None:
            os.environ["STAGEKIT_TRANSPORT"] = before


def start() -> dist.ProcessGroup:
    """Return the group of all ranks; the process keeps freed memory, as a worker's does, for both sides alike."""
    keep_freed_memory()
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def timed(step: Any, steps: int) -> Block:
    """Return wall and main-thread CPU seconds per step of one block."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        step()
    return (time.perf_counter() - wall) / steps, (time.thread_time() - cpu) / steps


def observe(ours: Ours, folder: Path) -> None:
    """Observe every step as a worker does, over a real link whose other end reads and drops."""
    here, there = socket.socketpair()

    def drain() -> None:
        while there.recv(65536):
            pass

    threading.Thread(target=drain, daemon=True).start()
    spec = {"train": {"steps": -1}, "observe": {"trace_steps": []}}
    link, expected = Link(here.detach()), {"bubble": 0.0, "step_s": 0.0}
    observer = Observer(link, ours.run, folder, spec, expected=expected, position=Position(link, ours.run))

    def after_step(result: StepResult, step_s: float) -> None:
        observer.after_step(ours.run.step_number, result, step_s=step_s, optimizer_s=0.0)

    ours.after_step = after_step


def equal(ours: Sequence[Ours], torchs: Torch) -> bool:
    """Say whether a step of every side gives this rank the same gradients, bit for bit."""
    torchs.step()
    theirs, same = torchs.gradients(), True
    for side in ours:
        side.step()
        mine = side.gradients()
        same &= mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    return same


def wrapped_stages(run: Run) -> dict[int, nn.Module]:
    """Return copies of this rank's stages as the runtime holds them."""
    return {index: run.source.stage_module(index, device=run.device) for index in run.own_stages}


def tiny(rank: int, schedule: str, chunks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measure the tiny stage on this rank, p=2: walls and CPU times of each block, calls per action, equality."""
    group = start()
    stages = tiny_stages(2 * STAGES_PER_RANK.get(schedule, 1))
    ours: dict[str, Ours] = {}
    for transport in TRANSPORTS:
        with over(transport):
            ours[transport] = Ours.chain(stages, schedule, chunks, group)
    plan = ours["gloo"].run.plan
    torchs = Torch(own_stages(stages, plan, rank), len(stages), schedule, chunks, group, *batch(chunks))
    bare = {
        "ours": Bare(wrapped_stages(ours["gloo"].run), len(stages) - 1, chunks),
        "torch": Bare(torchs.modules, len(stages) - 1, chunks),
    }
    same = equal(list(ours.values()), torchs)
    sides: dict[str, Any] = {**ours, "torch": torchs, "gloo again": ours["gloo"], "torch again": torchs}
    for _ in range(2):
        for side in (*sides.values(), *bare.values()):
            side.step()
    actions = bare["ours"].num_actions
    calls = {
        name: (count_calls(sides[name].step) - count_calls(bare["torch" if name == "torch" else "ours"].step)) / actions
        for name in (*TRANSPORTS, "torch")
    }
    blocks: dict[str, list[Block]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for transport in TRANSPORTS:
            (Path(folder) / transport).mkdir()
            observe(ours[transport], Path(folder) / transport)
        for _ in range(rounds):
            for name, side in sides.items():
                blocks.setdefault(name, []).append(timed(side.step, steps))
            for name, side in bare.items():
                blocks.setdefault(f"{name} bare", []).append(timed(side.step, steps))
    return {"blocks": blocks, "calls": calls, "equal": same, "actions": actions}


@dataclass(frozen=True)
class Sleep:
    """Stages that sleep: seconds of each stage's F and B for one chunk, ranks, chunks, and what crosses the cuts."""

    forward_s: float
    backward_s: float
    ranks: int
    chunks: int
    shape: Shape = TINY


def sleepy(rank: int, schedule: str, case: Sleep, rounds: int) -> dict[str, Any]:
    """Measure stages that sleep: per round the step of each side, and the ideal of the bare stages' measured times.

    A rank's time is that of one stage of `case`, whatever the number of stages on it.
    """
    group = start()
    per_rank = STAGES_PER_RANK.get(schedule, 1)
    stages: list[nn.Module] = [
        SleepStage(case.forward_s / per_rank, case.backward_s / per_rank) for _ in range(case.ranks * per_rank)
    ]
    ours: dict[str, Ours] = {}
    for transport in TRANSPORTS:
        with over(transport):
            ours[transport] = Ours.chain(stages, schedule, case.chunks, group, case.shape)
    plan = ours["gloo"].run.plan
    own, data = own_stages(stages, plan, rank), batch(case.chunks, case.shape)
    torchs = Torch(own, len(stages), schedule, case.chunks, group, *data)
    bare = Bare(wrapped_stages(ours["gloo"].run), len(stages) - 1, case.chunks, case.shape)
    same = equal(list(ours.values()), torchs)
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        dist.barrier()
        told: list[Any] = [None] * case.ranks
        dist.all_gather_object(told, bare.measure())
        costs = {stage: cost for each in told for stage, cost in each.items()}
        forward, backward = zip(*(costs[stage] for stage in range(len(stages))), strict=True)
        timeline = simulate(
            plan.actions, plan.extension, plan.stage_ranks, routes_of(plan.model), forward=forward, backward=backward,
            input_grad=backward, weight_grad=[0.0] * len(stages),
        )  # fmt: skip
        row = {name: timed(side.step, 1)[0] for name, side in {**ours, "torch": torchs}.items()}
        rows.append(row | {"ideal": timeline.makespan})
    return {"rows": rows, "equal": same}


# ---- a GPT of four layers


class Part(nn.Module):
    """What a user of torch.distributed.pipelining writes by hand: consecutive blocks of a GPT, and its ends."""

    def __init__(self, model: GPT, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[index] for index in blocks)
        self.token, self.position = (model.token, model.position) if blocks.start == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if blocks.stop == len(model.blocks) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations to activations or logits."""
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def byte_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of a chunk."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def gpt(rank: int, schedules: tuple[str, ...], theirs: tuple[str, ...], rounds: int) -> dict[str, list[Block]]:
    """Time a step of a GPT (4 layers, 256 wide, 128 bytes, 16 rows in 8 chunks) in one process and in two ranks."""
    layers, rows, length, chunks, group = 4, 16, 128, 8, start()
    torch.manual_seed(0)
    model = GPT(layers, 256, 4, length, 0.0)
    tokens = torch.randint(0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    x, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    sides: dict[str, Any] = {}
    for schedule in schedules:
        per_rank = STAGES_PER_RANK.get(schedule, 1)
        stages = 2 * per_rank
        pipe = stagekit.pipeline(
            model, args=(x[: rows // chunks],), loss_fn=byte_loss, stages=stages, chunks=chunks, schedule=schedule,
            stages_per_rank=per_rank, split=[f"blocks.{layers // stages * cut}" for cut in range(1, stages)],
        )  # fmt: skip
        for transport in TRANSPORTS:
            with over(transport):
                sides[f"{transport} {schedule}"] = Ours(pipe.deploy(group=group), x, target)
    for schedule in theirs:
        stages = 2 * STAGES_PER_RANK.get(schedule, 1)
        width = layers // stages
        own = {s: Part(model, range(s * width, (s + 1) * width)) for s in range(rank, stages, 2)}
        sides[f"torch {schedule}"] = Torch(own, stages, schedule, chunks, group, x, target, byte_loss)

    def whole() -> None:
        model.zero_grad()
        byte_loss(model(x), target).backward()

    with tempfile.TemporaryDirectory() as folder:
        watched = Ours(sides[f"gloo {schedules[0]}"].run, x, target)
        observe(watched, Path(folder))
        sides["watched"] = watched
        blocks: dict[str, list[Block]] = {}
        for number in range(rounds + 1):  # the first is the warm-up
            for name, side in sides.items():
                block = timed(side.step, 1)
                if number:
                    blocks.setdefault(name, []).append(block)
            block = timed(whole if rank == 0 else lambda: None, 1)
            if number:
                blocks.setdefault("one process", []).append(block)
    return blocks
