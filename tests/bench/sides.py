"""The three sides of the pipeline benchmark: our runtime, torch.distributed.pipelining, and the bare stages.

Each side runs whole training steps of the same stage modules on the same chunks; gradients are dropped before each
step. `Bare` is the floor: a plain loop over the chunks with autograd, nothing sent. Decides nothing about what is
measured; used by tests/bench/workloads.py and tests/integration/run/test_calls.py.
"""

from __future__ import annotations

import copy
import cProfile
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from stagekit.plan.plan import Plan, make_plan
from stagekit.run.lane import RunOptions, StepResult
from stagekit.run.runtime import Run
from stagekit.testing import ChainSource

# Our schedule → torch's nearest. Its interleaved zero bubble is ZB-1p; zb-auto finds that one or better.
TORCH_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B, "bfs": ScheduleLoopedBFS,
    "zb-v": ScheduleZBVZeroBubble, "zb-auto": ScheduleInterleavedZeroBubble,
}  # fmt: skip
STAGES_PER_RANK = {"interleaved": 2, "bfs": 2, "zb-v": 2, "zb-auto": 2}


@dataclass(frozen=True)
class Shape:
    """Of what crosses a cut: float32 [rows, width]."""

    rows: int
    width: int


TINY = Shape(2, 16)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Loss of one chunk."""
    return ((output - target) ** 2).mean()


def tiny_stages(count: int) -> list[nn.Module]:
    """Return `count` stages whose work is as close to nothing as a trainable one can be."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(TINY.width, TINY.width), nn.Tanh()) for _ in range(count)]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), None, None


class SleepStage(nn.Module):
    """Takes a fixed time forward and backward and no CPU: what a stage on an accelerator looks like to its host."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x * self.scale, self.forward_s, self.backward_s)
        return y


def batch(chunks: int, shape: Shape = TINY) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one step, equal on every rank."""
    generator = torch.Generator().manual_seed(1)
    rows = chunks * shape.rows
    return tuple(torch.randn(rows, shape.width, generator=generator) for _ in range(2))  # type: ignore[return-value]


class Ours:
    """Our runtime: inputs on the first stage's rank, target on the last's, the loss read on every rank after each step.

    `run` is any deployed pipeline; `chain` makes one of hand-made stages.
    """

    def __init__(self, run: Run, x: Tensor, target: Tensor) -> None:
        self.run, ranks = run, run.plan.stage_ranks
        self._args = (x,) if run.rank == ranks[0] else ()
        self._target = target if run.rank == ranks[-1] else None
        self.after_step: Callable[[StepResult, float], None] | None = None  # gets the result and the step's seconds

    @classmethod
    def chain(
        cls, stages: Sequence[nn.Module], schedule: str, chunks: int, group: dist.ProcessGroup, shape: Shape = TINY
    ) -> Ours:
        """Return the side for a chain of stages."""
        source = ChainSource(stages, shape.width, shape.rows)
        per_rank = STAGES_PER_RANK.get(schedule, 1)
        plan: Plan = make_plan(source.spec, schedule=schedule, num_chunks=chunks, stages_per_rank=per_rank)
        run = Run(source, plan, RunOptions(mean_square, None, 0), torch.device("cpu"), group)
        return cls(run, *batch(chunks, shape))

    def step(self) -> None:
        """Run one step from zeroed gradients."""
        started = time.perf_counter()
        self.run.zero_grad()
        result = self.run.step(*self._args, target=self._target)
        _ = result.loss
        if self.after_step is not None:
            self.after_step(result, time.perf_counter() - started)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients by the unsplit model's names."""
        return {name: p.grad for name, p in self.run.named_parameters() if p.grad is not None}


class Torch:
    """torch.distributed.pipelining on this rank's stages, by number, with the same inputs and target."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        num_stages: int,
        schedule: str,
        chunks: int,
        group: dist.ProcessGroup,
        x: Tensor,
        target: Tensor,
        loss: Callable[[Any, Any], Tensor] = mean_square,
    ) -> None:
        self.modules = {index: copy.deepcopy(module) for index, module in stages.items()}
        made = [
            PipelineStage(module, index, num_stages, torch.device("cpu"), group=group)
            for index, module in self.modules.items()
        ]
        kind = TORCH_SCHEDULES[schedule]
        many = schedule in STAGES_PER_RANK
        self._schedule = kind(made if many else made[0], n_microbatches=chunks, loss_fn=loss)
        self._args = (x,) if 0 in stages else ()
        self._target = target if num_stages - 1 in stages else None

    def step(self) -> None:
        """Run one step from zeroed gradients."""
        for module in self.modules.values():
            for parameter in module.parameters():
                parameter.grad = None
        if self._target is None:
            self._schedule.step(*self._args)
        else:
            losses: list[Tensor] = []
            self._schedule.step(*self._args, target=self._target, losses=losses)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients by the unsplit model's names."""
        return {
            f"{index}.{name}": p.grad
            for index, module in self.modules.items()
            for name, p in module.named_parameters()
            if p.grad is not None
        }


class Bare:
    """This rank's stages alone: forward and backward of every chunk in a plain loop, with ready inputs and gradients.

    `modules` are of the very kind that a side runs: their wrapper, if they have one, is no part of that side's overhead.
    """

    def __init__(self, modules: dict[int, nn.Module], last: int, chunks: int, shape: Shape = TINY) -> None:
        self._modules = {index: copy.deepcopy(module) for index, module in modules.items()}
        self._last, self.num_actions = last, 2 * len(modules) * chunks
        x, target = batch(chunks, shape)
        self._xs, self._targets = x.split(shape.rows), target.split(shape.rows)
        self._seed = torch.ones(shape.rows, shape.width)

    def step(self) -> None:
        """Run every chunk through every stage, forward then backward."""
        for index, module in self._modules.items():
            for parameter in module.parameters():
                parameter.grad = None
            for x, target in zip(self._xs, self._targets, strict=True):
                y = module(x.detach().requires_grad_() if index else x)
                if isinstance(y, tuple):
                    y = y[0]
                if index == self._last:
                    mean_square(y, target).backward()
                else:
                    torch.autograd.backward(y, self._seed)

    def measure(self) -> dict[int, tuple[float, float]]:
        """Return per stage the median seconds of one chunk's forward and backward, over one step."""
        costs = {}
        for index, module in self._modules.items():
            forward, backward = [], []
            for x, target in zip(self._xs, self._targets, strict=True):
                leaf = x.detach().requires_grad_()
                start = time.perf_counter()
                y = module(leaf)
                y = y[0] if isinstance(y, tuple) else y
                root, seed = (mean_square(y, target), None) if index == self._last else (y, self._seed)
                middle = time.perf_counter()
                torch.autograd.backward(root, seed)
                forward.append(middle - start)
                backward.append(time.perf_counter() - middle)
            costs[index] = statistics.median(forward), statistics.median(backward)
        return costs


def own_stages(stages: Sequence[nn.Module], plan: Plan, rank: int) -> dict[int, nn.Module]:
    """Return those of `stages` that the plan puts on `rank`, by number."""
    return {index: stages[index] for index, holder in enumerate(plan.stage_ranks) if holder == rank}


def count_calls(step: Callable[[], None]) -> int:
    """Return how many function calls, Python's and C's, the main thread makes in `step`."""
    profile = cProfile.Profile()
    profile.enable()
    step()
    profile.disable()
    return sum(int(entry.callcount) for entry in profile.getstats())
