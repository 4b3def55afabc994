"""Where torch leaves the way that a capture follows: its modules' looks at values, `.data`, `is_compiling()`, printed graphs.

nn.Transformer compares a mask with the causal one and gives attention a hint if they are equal; without the hint the
mask itself is applied, which is the same sum. `.data` is no operation that export sees; `.detach()` gives the same tensor.
A model that asks whether it is compiled may take another branch then; export says yes, and where that can't be captured,
the eager branch is tried. graph.capture.export enters `without_value_checks`, `quiet`, `answering_compiling`, `modules_stay`
and `DataIsDetached`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import _trace
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from stagekit.errors import CaptureError
from stagekit.graph.capture.functions import is_recording
from stagekit.graph.capture.lines import is_ours, line_here


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """Replace the checks for the duration of a capture."""
    original = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = _as_told
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from printing whole graphs before an error that a refusal then says in words."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    vars(_trace)["print"] = lambda *_, **__: None
    try:
        yield
    finally:
        del vars(_trace)["print"]
        logger.setLevel(level)


@contextlib.contextmanager
def answering_compiling(answer: bool, asked: list[str]) -> Iterator[None]:
    """Let the model (not torch itself) hear `answer` from torch.compiler.is_compiling(); note where it asks in `asked`."""
    original = torch.compiler.is_compiling

    def is_compiling() -> bool:
        if is_ours(sys._getframe(1).f_code.co_filename):
            return original()
        asked.append(line_here())
        return answer and original()

    torch.compiler.is_compiling = is_compiling
    try:
        yield
    finally:
        torch.compiler.is_compiling = original


def _as_told(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
    return is_causal is True


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """Make `module.to(...)` in forward the module itself where it changes nothing; on fake tensors torch's own fails."""
    original = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        wanted: Any = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, layout = wanted
        for tensor in (*module.parameters(), *module.buffers()):
            moved = device is not None and torch.device(device).type != tensor.device.type
            if moved or layout is not None or (dtype not in (None, tensor.dtype) and tensor.is_floating_point()):
                raise CaptureError(
                    f"{type(module).__name__}.to() changes weights in forward{line_here()}; call it where the model is "
                    "built, or convert the activations"
                )
        return module

    nn.Module.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]


class DataIsDetached(TorchFunctionMode):
    """While entered, an export records `x.data` as `x.detach()` and refuses to assign it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__get__ and is_recording():  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__ and is_recording():  # type: ignore[attr-defined]
            raise CaptureError(
                f".data of a tensor is assigned in forward{line_here()}, which no capture sees; write the tensor under "
                "torch.no_grad(): with copy_(), add_() or mul_()"
            )
        return func(*args, **(kwargs or {}))
