"""nn.SyncBatchNorm as a pipeline runs it: statistics over the rows of all replicas' chunks of one number, on any device.

torch's own asks the process group in forward, which a capture can't hold, and takes no CPU tensors. While `recordable()`
is entered its forward is one call of `SyncedBatchNorm`, which a capture keeps as a node. That asks nobody by itself:
stagekit.run.synced says with `summing` how sums over replicas are made; elsewhere (self-check, costs, one replica) it is
plain BatchNorm, to the last bit. Decides nothing about when replicas meet. Called by stagekit.graph.capture and stagekit.run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagekit.errors import CaptureError

Sum = Callable[[Tensor], Tensor]  # a float64 vector → its sum over the replicas

_sum: Sum | None = None


@contextmanager
def summing(over_replicas: Sum | None) -> Iterator[None]:
    """Forwards inside, and their backwards whenever they come, add their statistics up with `over_replicas`."""
    global _sum
    before, _sum = _sum, over_replicas
    try:
        yield
    finally:
        _sum = before


class SyncedBatchNorm(torch.autograd.Function):
    """BatchNorm of x [rows, channels, …] in training; one sum over replicas in forward and one in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Normalise, and bring the running statistics forward. Raises ValueError for one value per channel in all."""
        ctx.sum, ctx.eps = _sum, eps
        if _sum is None:
            _check_count(x.numel() // x.shape[1], x)
            out, mean, scale = _plain(x, weight, bias, running_mean, running_var, momentum, eps)
            ctx.save_for_backward(x, weight, mean, scale)
            return out
        mean, var, count = _moments(x, _sum)
        ctx.count = count
        _check_count(count, x)
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
                if running is not None:
                    running.copy_(running * (1 - momentum) + now.to(running.dtype) * momentum)
        kind = torch.promote_types(x.dtype, torch.float32)
        mean, var = mean.to(kind), var.to(kind)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        if ctx.sum is None:
            made = torch.ops.aten.native_batch_norm_backward(
                gradient, x, weight, None, None, mean, scale, True, ctx.eps, wants
            )
            return *(each if wanted else None for each, wanted in zip(made, wants, strict=True)), *[None] * 4
        shape = [1, -1, *[1] * (x.ndim - 2)]
        dims = [dim for dim in range(x.ndim) if dim != 1]
        g = gradient.to(scale.dtype)
        normal = (x.to(scale.dtype) - mean.view(shape)) * scale.view(shape)
        of_bias, of_weight = g.sum(dims), (g * normal).sum(dims)
        total = ctx.sum(torch.cat([of_bias, of_weight]).double()).div_(ctx.count).to(scale.dtype)
        mean_g, mean_gx = (part.view(shape) for part in total.chunk(2))
        factor = scale if weight is None else scale * weight
        of_x = ((g - mean_g - normal * mean_gx) * factor.view(shape)).to(x.dtype) if wants[0] else None
        own = [
            part.to(weight.dtype) if wanted else None
            for part, wanted in zip((of_weight, of_bias), wants[1:], strict=True)
        ]
        return of_x, *own, *[None] * 4


def _plain(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what torch's own operator makes of this process' rows: output, mean, 1 / standard deviation."""
    if running_mean is None or running_var is None:
        made = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    else:
        made = torch.ops.aten._native_batch_norm_legit(x, weight, bias, running_mean, running_var, True, momentum, eps)
    out, mean, scale = made
    return out, mean, scale


def _moments(x: Tensor, over_replicas: Sum) -> tuple[Tensor, Tensor, float]:
    """Return mean and biased variance [channels], in float64, and the number of values per channel, of all replicas."""
    own = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    var, mean = (each.double() for each in torch.var_mean(own, dims, correction=0))
    count = x.numel() // x.shape[1]
    parts = [mean * count, (var + mean * mean) * count, mean.new_tensor([count])]
    total = over_replicas(torch.cat(parts))
    sums, squares, counts = total.split([x.shape[1], x.shape[1], 1])
    mean = sums / counts
    return mean, (squares / counts - mean * mean).clamp_min_(0.0), float(counts)


def _check_count(count: float, x: Tensor) -> None:
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")


def _forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    x = input
    self._check_input_dim(x)
    self._check_non_zero_input_channels(x)
    if not self.training:
        by_batch = self.running_mean is None and self.running_var is None
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, by_batch, 0.0, self.eps)
    if self.process_group is not None:
        raise CaptureError(
            "a SyncBatchNorm has a process_group of its own; leave it out: in a pipeline it counts the rows of the stage's replicas"
        )
    if self.momentum is None and self.track_running_stats:
        raise CaptureError(
            "a SyncBatchNorm has momentum=None, which reads the number of batches in Python; give it a momentum"
        )
    running_mean = running_var = None
    if self.track_running_stats:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        running_mean, running_var = self.running_mean, self.running_var
    made: Tensor = SyncedBatchNorm.apply(  # type: ignore[no-untyped-call]
        x, self.weight, self.bias, running_mean, running_var, self.momentum or 0.0, self.eps
    )
    return made


@contextmanager
def recordable() -> Iterator[None]:
    """While entered, every nn.SyncBatchNorm computes by `SyncedBatchNorm` alone, and asks for no process group."""
    before = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = before  # type: ignore[method-assign]
