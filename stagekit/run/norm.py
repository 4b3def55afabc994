"""The global gradient norm: float64 per parameter, a tied one once, in an order that no cut changes.

Each rank fills in the squares of the parameters that it holds; their sum over ranks is exact, since every number has one
holder and the others add zeros. Called by stagekit.run.runtime.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stagekit.plan.contract import ModelSpec
from stagekit.run.data_parallel import whole


def zero_squares(spec: ModelSpec) -> Tensor:
    """Return a zero per parameter of the unsplit model, float64."""
    return torch.zeros(len({p.name for stage in spec.stages for p in stage.parameters}), dtype=torch.float64)


def squares_of(spec: ModelSpec, modules: Mapping[int, nn.Module]) -> Tensor:
    """Return the squared norm of each parameter's gradient, in name order; `modules` by stage.

    Zero for those without one, and for those that another stage answers for: of tied ones the first counts. Sharded
    gradients are gathered, on every replica alike.
    """
    names = sorted({p.name for stage in spec.stages for p in stage.parameters})
    order = {name: index for index, name in enumerate(names)}
    holder = {p.name: stage.index for stage in reversed(spec.stages) for p in stage.parameters}
    squares = zero_squares(spec)
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and holder[name] == stage:
                norm = whole(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
                squares[order[name]] = norm.cpu() ** 2
    return squares
