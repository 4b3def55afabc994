"""Warm-up: compile a stage's forward and backward before the first step, leaving no trace.

Runs every bucket once on zeros; what the forward writes, gradients and the random state are as before. Used at deploy by run.compiling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stagekit.plan.contract import InputRef, ModelSpec, SymbolRef, TensorSpec, ValueRef
from stagekit.run.layout import concrete
from stagekit.run.stage import StageRunner, restored, run_backward


class Warmup:
    """Runs one example chunk of zeros through a stage, as often as asked."""

    def __init__(self, runner: StageRunner, spec: ModelSpec, device: torch.device) -> None:
        self._runner, self._device = runner, device
        self._devices = [device] if device.type == "cuda" else []
        self._arguments = _example(runner, spec, device)

    def run(self) -> None:
        """Run forward and backward once; also after an error everything is as before."""
        runner = self._runner
        gradients = [(parameter, parameter.grad) for parameter in runner.module.parameters()]
        peak = runner.peak_chunks
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            with restored(runner.module), torch.random.fork_rng(devices=self._devices), torch.enable_grad():
                outputs = runner.forward(0, list(self._arguments), 0, True)
                if runner.keeps_no_graph:
                    runner.backward(0, [torch.zeros_like(output) for output in outputs])
                else:
                    roots = tuple(out for out in outputs if isinstance(out, Tensor) and out.requires_grad)
                    if roots:
                        run_backward(roots, tuple(torch.zeros_like(root) for root in roots))
        finally:
            runner.drop_all()
            runner.peak_chunks = peak
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _example(runner: StageRunner, spec: ModelSpec, device: torch.device) -> list[Any]:
    symbols = {symbol.name: symbol.example for symbol in spec.symbols}
    edges = {edge.value: edge.tensor for edge in spec.edges}
    arguments: list[Any] = []
    for ref in runner.spec.inputs:
        match ref:
            case ValueRef(value):
                arguments.append(_zeros(edges[value], symbols, device))
            case InputRef(number):
                tensor = spec.inputs[number].tensor
                assert tensor is not None
                arguments.append(_zeros(tensor, symbols, device))
            case SymbolRef(symbol):
                arguments.append(symbols[symbol])
    return arguments


def _zeros(tensor: TensorSpec, symbols: dict[str, int], device: torch.device) -> Tensor:
    shape, stride, dtype = concrete(tensor, symbols)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
