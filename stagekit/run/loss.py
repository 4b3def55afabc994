"""The loss on the last stage: every chunk's loss, weight and share of the gradient.

The step's gradient is Σ w_c ∇ℓ_c / Σ w_c, the sum of weights over chunks and replicas. Weights are known at the first
forward, their sum over replicas travels while the pipeline fills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from stagekit.errors import ShapeError, UserError
from stagekit.plan.contract import ModelSpec
from stagekit.plan.seeds import loss_seed
from stagekit.run.chunks import split_target
from stagekit.run.inputs import InputExchange

LossFunction = Callable[[Any, Any], Tensor]
LossWeight = Callable[[Any], float] | str  # of a target; SUM: losses are added, not averaged
SUM = "sum"


class LossRunner:
    """Losses of one step. `group` holds the last-stage ranks of all replicas; None: a single replica."""

    def __init__(
        self,
        spec: ModelSpec,
        inputs: InputExchange,
        target_tree: Any,
        unflatten_output: Callable[[list[Any]], Any],
        loss_fn: LossFunction,
        loss_weight: LossWeight | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._inputs, self._target_tree = inputs, target_tree
        self._unflatten_output, self._loss_fn, self._loss_weight, self._group = (
            unflatten_output,
            loss_fn,
            loss_weight,
            group,
        )
        names = spec.stages[-1].outputs
        self._leaves = tuple(
            (None, leaf.constant) if leaf.value is None else (names.index(leaf.value), None) for leaf in spec.outputs
        )  # per leaf of the model's output: its position in the last stage's outputs, or its constant
        self.scale = 1.0  # of the gradient alone; losses are told as they are
        self._seed_scales: dict[tuple[float, torch.dtype, torch.device, torch.Size], Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        self.targets: list[Any] | None = None  # by chunk, once `prepare` ran
        self._work: Any = None
        self._sum: Tensor | None = None
        self._total: float | None = None
        self._roots: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}  # by chunk, in the order in which the schedule runs them
        self.weights: list[float] = []

    def prepare(self, sizes: Sequence[int]) -> None:
        """Cut the target and start summing the weights over replicas; called once per step, before the first chunk."""
        leaves = split_target(self._inputs.target(), sum(sizes), sizes)
        if self._target_tree is None:  # the model computes its loss itself
            self.targets = [None] * len(sizes)
        elif self._target_tree.is_leaf():
            self.targets = [chunk[0] for chunk in leaves]
        else:
            self.targets = [pytree.tree_unflatten(list(chunk), self._target_tree) for chunk in leaves]
        if self._loss_weight is None:
            self.weights = [float(size) for size in sizes]
        elif isinstance(self._loss_weight, str):
            self.weights, self._total = [1.0] * len(sizes), 1.0
        else:
            self.weights = [float(self._loss_weight(target)) for target in self.targets]
        total = sum(self.weights)
        if not (min(self.weights) >= 0.0 and total < float("inf")):  # NaN is neither
            raise UserError(f"loss_weight returned {self.weights}; a weight is a finite number ≥ 0")
        self._sum = torch.tensor([total], dtype=torch.float64, device=self._inputs.device)
        if self._group is not None:
            self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)

    def abandon(self) -> None:
        """The step failed before or after `prepare`: join the sum of weights, for which other replicas wait."""
        if self._sum is None:
            self._sum = torch.zeros(1, dtype=torch.float64, device=self._inputs.device)
            if self._group is not None:
                self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)
        self.total_weight()

    def total_weight(self) -> float:
        """Return the sum of weights over chunks and replicas; blocks until it is known."""
        if self._total is None:
            assert self._sum is not None
            if self._work is not None:
                self._work.wait()
                self._work = None
            self._total = float(self._sum)
        return self._total

    def forward(self, chunk: int, outputs: tuple[Tensor, ...], base: int, train: bool) -> None:
        """Compute the loss of `chunk` once, from the last stage's outputs."""
        assert self.targets is not None
        leaves: list[Any] = []
        for position, constant in self._leaves:
            leaves += (constant if position is None else outputs[position],)
        torch.default_generator.manual_seed(loss_seed(base))
        loss = self._loss_fn(self._unflatten_output(leaves), self.targets[chunk])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ShapeError(f"the loss function returned {got}; it must return a scalar, the mean over the chunk")
        if train:
            if self.weights[chunk] and not (loss.requires_grad and loss.dtype.is_floating_point):
                raise _trains_nothing(loss)
            self._roots[chunk] = loss
        self._losses[chunk] = loss.detach()

    @property
    def losses(self) -> list[Tensor]:
        """The losses that were computed, in the order of chunks."""
        return [loss for _, loss in sorted(self._losses.items())]

    @property
    def adds(self) -> bool:
        """Whether losses are sums, which are added, and so have no weights of their own."""
        return isinstance(self._loss_weight, str)

    def take(self, chunk: int) -> tuple[Tensor, Tensor | None]:
        """Return the loss of `chunk` with its graph, and its share of the gradient (None: it weighs nothing)."""
        root = self._roots[chunk]
        del self._roots[chunk]
        weight = self.weights[chunk]
        if weight == 0.0:
            return root, None
        key = (self.scale * weight / (self._total or self.total_weight()), root.dtype, root.device, root.shape)
        if key not in self._seed_scales:
            if len(self._seed_scales) > 64:
                self._seed_scales.clear()  # weights that are counts of tokens differ from step to step
            self._seed_scales[key] = torch.full_like(root, key[0], requires_grad=False)
        return root, self._seed_scales[key]

    def result(self) -> float:
        """Return this replica's part of the step's loss: Σ w_c ℓ_c / Σ w_c, where a chunk of weight 0 adds nothing."""
        total = self.total_weight()
        if total == 0.0:
            return 0.0
        part = 0.0
        for weight, loss in zip(self.weights, self.losses, strict=True):
            if weight:
                part += weight * float(loss)
        return part / total


def output_weights(loss: LossRunner | None, sizes: Sequence[int]) -> list[float]:
    """Return what `Mean` weighs the outputs of chunks by: the loss's weights, and rows where losses are only added."""
    return [float(size) for size in sizes] if loss is None or loss.adds else loss.weights


def _trains_nothing(loss: Tensor) -> UserError:
    """Return the refusal of what plain torch refuses in backward: a loss that nothing could be learned from."""
    if not loss.dtype.is_floating_point:
        return UserError(f"the loss is a {loss.dtype} tensor; a loss to train with is a real floating-point number")
    return UserError(
        "the loss does not depend on anything that trains: the model or the loss function detaches it, or every "
        "parameter is frozen"
    )
