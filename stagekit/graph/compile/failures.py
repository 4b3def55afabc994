"""Which line of the user's code a stage was at when it failed: its graph runs in code that torch.fx generated.

Called by graph.compile.module around every forward of a stage; stagekit.run puts the note into the StageError.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import fx

from stagekit.graph.passes.propagate import line_of


def note_line(error: BaseException) -> None:
    """Add to `error` a note with the user's line and the node that raised it, if the error passed through a graph."""
    for frame, number in reversed(list(_frames(error))):
        node = _node_at(frame, number)
        if node is not None:
            line = line_of(node)
            error.add_note(f"in {node.name} ({node.target}){'' if '<eval_with_key>' in line else line}")
            return


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _node_at(frame: FrameType, number: int) -> fx.Node | None:
    """Return the node that a line of generated code computes."""
    if not frame.f_code.co_filename.startswith("<eval_with_key>"):
        return None
    module: Any = frame.f_locals.get("self")
    lines = getattr(module, "_lineno_map", None)
    if not isinstance(module, fx.GraphModule) or not lines:
        return None
    index = lines.get(number - module._prologue_start)
    nodes = list(module.graph.nodes)
    return nodes[index] if index is not None and index < len(nodes) else None
