"""Where torch leaves the way that a capture follows: its modules' looks at values, `.data`, and graphs printed on errors.

nn.Transformer compares a mask with the causal one and gives attention a hint if they are equal; without the hint the
mask itself is applied, which is the same sum. `.data` is no operation that export sees; `.detach()` gives the same tensor.
graph.capture.export enters `without_value_checks`, `quiet` and
`DataIsDetached`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.export import _trace
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from stagekit.errors import CaptureError
from stagekit.graph.capture.functions import is_recording
from stagekit.graph.capture.lines import line_here


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


def _as_told(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
    return is_causal is True


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
