"""In which floating-point type a model computes: `precision` is that of torch.autocast around the whole forward.

Decides the names and the types they stand for. The model is exported and checked under it (graph.capture), which notes the
region on every node, so that stages enter it themselves; stagekit.api computes the loss under it. Parameters keep their
own type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

FP32, FP16 = "fp32", "fp16"
PRECISIONS: dict[str, torch.dtype | None] = {FP32: None, "bf16": torch.bfloat16, FP16: torch.float16}


def autocast(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """Return what a forward of `precision` runs under."""
    dtype = PRECISIONS[precision]
    if dtype is None:
        return nullcontext()
    return torch.autocast(device_type, dtype, cache_enabled=False)  # a cache would hold tensors of the capture


def precise(function: Callable[..., Tensor], precision: str, device_type: str) -> Callable[..., Tensor]:
    """Return a loss function that computes under `precision`."""
    if PRECISIONS[precision] is None:
        return function

    @functools.wraps(function)
    def under_autocast(*args: Any) -> Tensor:
        with autocast(precision, device_type):
            return function(*args)

    return under_autocast
