"""The loss on the last stage: every chunk's loss, weight and share of the gradient.

The step's gradient is Σ w_c ∇ℓ_c / Σ w_c, the sum of weights over chunks and replicas. Weights are known at the first
forward, their sum over replicas travels while the pipeline fills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from stagekit.errors import ShapeError, UserError
from stagekit.plan.contract import ModelSpec
from stagekit.plan.seeds import LOSS, mix
from stagekit.run.chunks import split_target
from stagekit.run.inputs import InputExchange

LossFunction = Callable[[Any, Any], Tensor]
LossWeight = Callable[[Any], float]


class LossRunner:
    """Losses of one step. `group` holds the last-stage ranks of all replicas; None: a single replica."""

    def __init__(
        self,
        spec: ModelSpec,
        inputs: InputExchange,
        target_tree: Any,
        unflatten_output: Callable[[list[Any]], Any],
        loss_fn: LossFunction,
        loss_weight: LossWeight,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._spec, self._inputs, self._target_tree = spec, inputs, target_tree
        self._unflatten_output, self._loss_fn, self._loss_weight, self._group = (
            unflatten_output,
            loss_fn,
            loss_weight,
            group,
        )
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        self._targets: list[Any] | None = None
        self._work: Any = None
        self._total: Tensor | None = None
        self._roots: dict[int, Tensor] = {}
        self.losses: list[Tensor] = []
        self.weights: list[float] = []

    def prepare(self, sizes: Sequence[int]) -> None:
        """Cut the target and start summing the weights over replicas; does nothing after a step's first call."""
        if self._targets is not None:
            return
        leaves = split_target(self._inputs.target(), sum(sizes), sizes)
        self._targets = [pytree.tree_unflatten(list(chunk), self._target_tree) for chunk in leaves]
        self.weights = [float(self._loss_weight(target)) for target in self._targets]
        if any(not weight >= 0.0 for weight in self.weights):
            raise UserError(f"loss_weight returned {self.weights}; a weight is a number ≥ 0")
        self._total = torch.tensor([sum(self.weights)], dtype=torch.float64, device=self._inputs.device)
        if self._group is not None:
            self._work = dist.all_reduce(self._total, group=self._group, async_op=True)

    def total_weight(self) -> float:
        """Return the sum of weights over chunks and replicas; blocks until it is known."""
        assert self._total is not None
        if self._work is not None:
            self._work.wait()
            self._work = None
        return float(self._total)

    def forward(self, chunk: int, outputs: Mapping[str, Tensor], base: int, train: bool) -> None:
        """Compute the loss of `chunk` once, from the last stage's outputs by value name."""
        assert self._targets is not None
        leaves = [spec.constant if spec.value is None else outputs[spec.value] for spec in self._spec.outputs]
        torch.default_generator.manual_seed(mix(base, LOSS) & 0xFFFFFFFF)
        with torch.set_grad_enabled(train):
            loss = self._loss_fn(self._unflatten_output(leaves), self._targets[chunk])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ShapeError(f"the loss function returned {got}; it must return a scalar, the mean over the chunk")
        if train:
            self._roots[chunk] = loss
        self.losses.append(loss.detach())

    def scale(self, chunk: int) -> Tensor | None:
        """Return this chunk's share of the gradient, None when it weighs nothing."""
        weight = self.weights[chunk]
        if weight == 0.0:
            return None
        root = self._roots[chunk]
        return torch.full_like(root, weight / self.total_weight(), requires_grad=False)

    def pop(self, chunk: int) -> Tensor:
        """Return the loss of `chunk` with its graph, and forget it."""
        return self._roots.pop(chunk)

    def result(self) -> float:
        """Return this replica's part of the step's loss: Σ w_c ℓ_c / Σ w_c, where a chunk of weight 0 adds nothing."""
        total = self.total_weight()
        if total == 0.0:
            return 0.0
        pairs = zip(self.weights, self.losses, strict=True)
        return sum(weight * float(loss) for weight, loss in pairs if weight) / total
