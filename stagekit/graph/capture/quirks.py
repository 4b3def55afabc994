"""Where torch's own modules look at values to choose a faster way, while a model is captured: take the general way.

nn.Transformer compares a mask with the causal one and gives attention a hint if they are equal; without the hint the
mask itself is applied, which is the same sum. graph.capture.export enters `without_value_checks`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.modules import transformer


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """Replace the checks for the duration of a capture."""
    original = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = _as_told
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


def _as_told(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
    return is_causal is True
