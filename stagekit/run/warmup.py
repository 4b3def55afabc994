"""Warm-up: compile a stage's forward and backward before the first step, leaving no trace.

Runs every bucket once on zeros; buffers, gradients and the random state are as before. Called at deploy, for compiled
stages only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stagekit.plan.contract import InputRef, ModelSpec, SymbolRef, TensorSpec, ValueRef
from stagekit.run.layout import concrete
from stagekit.run.stage import StageRunner, run_backward


def warm_up(runner: StageRunner, spec: ModelSpec, device: torch.device) -> None:
    """Run one example chunk of zeros through the stage, forward and backward."""
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
    buffers = [(buffer, buffer.clone()) for buffer in runner.module.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        with torch.enable_grad():
            outputs = runner.forward(0, arguments, 0, True)
        roots = tuple(output for output in outputs if isinstance(output, Tensor) and output.requires_grad)
        if roots:
            run_backward(roots, tuple(torch.zeros_like(root) for root in roots))
    runner.drop_all()
    for parameter in runner.module.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    runner.peak_chunks = 0


def _zeros(tensor: TensorSpec, symbols: dict[str, int], device: torch.device) -> Tensor:
    shape, stride, dtype = concrete(tensor, symbols)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
