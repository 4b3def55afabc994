"""Which line of the user's own code something comes from: an error while the model is captured, or the call in progress.

Used by graph.capture.export, graph.capture.functions and graph.capture.refusals; the lines of captured nodes are in `propagate.line_of`.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_PYTHON = sysconfig.get_path("stdlib")


def line_of_error(error: BaseException) -> str:
    """Return ' at "file", line n, in name' of the user's innermost frame in a traceback, or ""."""
    return _text(traceback.extract_tb(error.__traceback__))


def line_here() -> str:
    """Return ' at "file", line n, in name' of the user's innermost frame of the calls in progress, or ""."""
    return _text(traceback.extract_stack())


def is_ours(filename: str) -> bool:
    """Tell whether a frame belongs to Python, torch or stagekit.graph instead of to the user or a model library."""
    if filename.startswith(_PYTHON) and "site-packages" not in filename:
        return True
    return filename.startswith((_TORCH, _OURS, "<"))


def is_torch_internal(filename: str) -> bool:
    """Tell whether a file is torch's, but not one of torch.nn, whose modules branch on sizes as a user's do."""
    return filename.startswith(_TORCH) and not filename.startswith(str(Path(_TORCH) / "nn"))


def _text(frames: Sequence[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if not is_ours(frame.filename)]
    return f' at "{own[-1].filename}", line {own[-1].lineno}, in {own[-1].name}' if own else ""
