"""The three sides of the pipeline benchmark: our runtime, torch.distributed.pipelining, and the bare stage.

Each side runs whole training steps of the same stage modules on the same chunks; gradients are dropped before each
step. `Bare` is the floor: a plain loop over the chunks with autograd, nothing sent. Decides nothing about what is
measured; used by tests/bench/pipeline.py and tests/integration/run/test_calls.py.
"""

from __future__ import annotations

import copy
import cProfile
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from stagekit.plan.plan import Plan, make_plan
from stagekit.run.lane import RunOptions, StepResult
from stagekit.run.runtime import Run
from stagekit.testing import ChainSource

WIDTH, ROWS = 16, 2  # of a tiny stage and its chunks


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Loss of one chunk."""
    return ((output - target) ** 2).mean()


def tiny_stages(count: int) -> list[nn.Module]:
    """Return `count` stages whose work is as close to nothing as a trainable one can be."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


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
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x * self.scale, self.forward_s, self.backward_s)
        return y


def batch(chunks: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one step, equal on every rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (chunks * ROWS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


class Ours:
    """Our runtime: inputs on the first rank, target on the last, the loss read on every rank after each step."""

    def __init__(self, stages: Sequence[nn.Module], schedule: str, chunks: int, group: dist.ProcessGroup) -> None:
        source = ChainSource(stages, WIDTH, ROWS)
        self.plan: Plan = make_plan(source.spec, schedule=schedule, num_chunks=chunks)
        self.run = Run(source, self.plan, RunOptions(mean_square, None, 0), torch.device("cpu"), group)
        rank, x, target = dist.get_rank(group), *batch(chunks)
        self._args = (x,) if rank == 0 else ()
        self._target = target if rank == len(stages) - 1 else None
        self.after_step: Callable[[StepResult, float], None] | None = None  # gets the result and the step's seconds
        self.bare = Bare(source.stage_module(rank, device=torch.device("cpu")), chunks, rank, len(stages) - 1)

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
    """torch.distributed.pipelining on the same stage, inputs and target."""

    def __init__(self, stages: Sequence[nn.Module], schedule: str, chunks: int, group: dist.ProcessGroup) -> None:
        self._rank, self._last = dist.get_rank(group), len(stages) - 1
        self._module = copy.deepcopy(stages[self._rank])
        stage = PipelineStage(self._module, self._rank, len(stages), torch.device("cpu"), group=group)
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
        self._schedule = kind(stage, n_microbatches=chunks, loss_fn=mean_square)
        self._x, self._target = batch(chunks)
        self.bare = Bare(self._module, chunks, self._rank, self._last)

    def step(self) -> None:
        """Run one step from zeroed gradients."""
        for parameter in self._module.parameters():
            parameter.grad = None
        if self._rank == 0:
            self._schedule.step(self._x)
        elif self._rank == self._last:
            losses: list[Tensor] = []
            self._schedule.step(target=self._target, losses=losses)
        else:
            self._schedule.step()

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients by the unsplit model's names."""
        return {f"{self._rank}.{name}": p.grad for name, p in self._module.named_parameters() if p.grad is not None}


class Bare:
    """The stage alone: forward and backward of every chunk in a plain loop, with ready inputs and gradients.

    `module` is the very module that a side runs: its wrapper, if it has one, is no part of that side's overhead.
    """

    def __init__(self, module: nn.Module, chunks: int, rank: int, last: int) -> None:
        self._module, self._first, self._last = copy.deepcopy(module), rank == 0, rank == last
        x, target = batch(chunks)
        self._xs, self._targets = x.split(ROWS), target.split(ROWS)
        self._seed = torch.ones(ROWS, WIDTH)

    def step(self) -> None:
        """Run every chunk, forward then backward."""
        for parameter in self._module.parameters():
            parameter.grad = None
        for x, target in zip(self._xs, self._targets, strict=True):
            y = self._module(x if self._first else x.detach().requires_grad_())
            if isinstance(y, tuple):
                y = y[0]
            if self._last:
                mean_square(y, target).backward()
            else:
                torch.autograd.backward(y, self._seed)

    def measure(self) -> tuple[float, float]:
        """Return the median seconds of one chunk's forward and backward, over one step."""
        forward, backward = [], []
        for x, target in zip(self._xs, self._targets, strict=True):
            leaf = x.detach().requires_grad_()
            start = time.perf_counter()
            y = self._module(leaf)[0]
            root, seed = (mean_square(y, target), None) if self._last else (y, self._seed)
            middle = time.perf_counter()
            torch.autograd.backward(root, seed)
            forward.append(middle - start)
            backward.append(time.perf_counter() - middle)
        return statistics.median(forward), statistics.median(backward)


def count_calls(step: Callable[[], None]) -> int:
    """Return how many function calls, Python's and C's, the main thread makes in `step`."""
    profile = cProfile.Profile()
    profile.enable()
    step()
    profile.disable()
    return sum(int(entry.callcount) for entry in profile.getstats())
