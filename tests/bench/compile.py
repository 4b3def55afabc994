"""Two compiled stages beside the whole compiled model: CPU time of a training step, forward and backward, in one process.

`python tests/bench/compile.py [--quick]` prints a table and writes tests/bench/results/<date>-compile.json. Both are
compiled with inductor; the stages run one after the other and hand values on as a pipeline does. Steps alternate, on
the thread's own clock; a ratio is of two steps that ran next to each other. Goal: median and minima at most 1.03.
A stage more costs about 0.4 ms a chunk on a quiet machine, whatever it computes (the compiled function's wrappers,
forward and backward), and one more pass over what crosses the cut, which no kernel fuses any longer.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stagekit.examples import gpt
from stagekit.graph.capture.capture import capture
from stagekit.graph.cut.cut import Cut
from stagekit.plan.contract import InputRef, SymbolRef, ValueRef
from stagekit.run.allocator import keep_freed_memory
from tests.bench.machine import hardware, write_results
from tests.bench.partition import Residual

GOAL = 1.03
Model = tuple[nn.Module, tuple[Any, ...]]


def language_model() -> Model:
    """A GPT of two layers."""
    program = gpt.Program(layers=2, width=192, heads=4, sequence=128, batch=16)
    return program.build_model(), program.example_inputs()[0]


def convnet() -> Model:
    """Four residual blocks."""
    layers = [nn.Conv2d(3, 64, 3, 1, 1), Residual(64, 64, 1), Residual(64, 128, 2), Residual(128, 128, 1)]
    layers += [Residual(128, 256, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), (torch.randn(4, 3, 32, 32),)


def perceptron() -> Model:
    """Eight layers: what a call costs shows most."""
    layers = [m for _ in range(8) for m in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(128, 512),)


MODELS: dict[str, Callable[[], Model]] = {
    "perceptron": perceptron, "gpt": language_model, "convnet": convnet,
}  # fmt: skip


class Stages:
    """All stages of a cut; `step` runs one chunk through them, forward and backward."""

    def __init__(self, cut: Cut, args: tuple[Any, ...]) -> None:
        self.spec = cut.spec
        self.modules = [cut.stage_module(index, compile="inductor") for index in range(len(cut.spec.stages))]
        self.leaves = cut.captured.flatten_inputs(args)
        self.grads = {edge.value: edge.tensor.requires_grad for edge in cut.spec.edges}
        self.sizes = {symbol.name: symbol.example for symbol in cut.spec.symbols}

    def step(self) -> None:
        """Run one chunk; gradients are added to `.grad`."""
        made: dict[str, Tensor] = {}
        received: list[dict[str, Tensor]] = []
        for stage, module in zip(self.spec.stages, self.modules, strict=True):
            taken: dict[str, Tensor] = {}
            inputs: list[Any] = []
            for ref in stage.inputs:
                match ref:
                    case ValueRef(value):
                        taken[value] = made[value].detach().requires_grad_(self.grads[value])
                        inputs.append(taken[value])
                    case InputRef(number):
                        inputs.append(self.leaves[number])
                    case SymbolRef(symbol):
                        inputs.append(self.sizes[symbol])
            received.append(taken)
            made.update(zip(stage.outputs, module(*inputs), strict=True))
        last = made[self.spec.stages[-1].outputs[0]]
        gradients: dict[str, Tensor] = {self.spec.stages[-1].outputs[0]: torch.ones_like(last)}
        for stage, taken in zip(reversed(self.spec.stages), reversed(received), strict=True):
            names = [name for name in stage.outputs if name in gradients]
            torch.autograd.backward([made[name] for name in names], [gradients[name] for name in names])
            for name, value in taken.items():
                if value.grad is not None:
                    gradients[name] = gradients[name] + value.grad if name in gradients else value.grad


def measure_model(name: str, rounds: int) -> dict[str, Any]:
    """Return the row of one model."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, args = MODELS[name]()
    captured = capture(copy.deepcopy(model), args, check=False)
    stages = Stages(captured.cut("balanced", 2), args)
    whole = torch.compile(model, backend="inductor")

    def step_whole() -> None:
        output = whole(*args)
        torch.autograd.backward([output], [torch.ones_like(output)])

    def timed(step: Callable[[], None]) -> float:
        started = time.thread_time()
        step()
        return time.thread_time() - started

    for _ in range(3):
        stages.step()
        step_whole()
    ours, theirs = [], []
    for number in range(rounds):
        for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            (ours if side == "ours" else theirs).append(timed(stages.step if side == "ours" else step_whole))
    ratio_median = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    ratio_min = min(ours) / min(theirs)
    row = {"model": name, "ours_ms": min(ours) * 1e3, "whole_ms": min(theirs) * 1e3, "ratio_min": ratio_min}
    return row | {"ratio_median": ratio_median, "reached": max(ratio_min, ratio_median) <= GOAL}


def report(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [f"2 compiled stages ÷ the whole model compiled, CPU of a step (goal ≤ {GOAL})"]
    for row in rows:
        lines.append(
            f"  {row['model']:<10} ours {row['ours_ms']:8.2f} ms   whole {row['whole_ms']:8.2f} ms   ratio of minima "
            f"{row['ratio_min']:.3f}   median ratio {row['ratio_median']:.3f}   "
            f"{'reached' if row['reached'] else 'NOT reached'}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run every model; return 0 if all reach the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--model", choices=MODELS, help="this one only")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    keep_freed_memory()
    machine = hardware()
    names = [options.model] if options.model else list(MODELS)
    rows = [measure_model(name, 15 if options.quick else 60) for name in names]
    print(report(rows))
    if not options.no_file:
        write_results("compile", machine, quick=options.quick, rows=rows)
    return 0 if all(row["reached"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
