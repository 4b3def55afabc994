"""What a call of the DDP split may be given, told by its name before anything is compiled. Called by graph.bucket alone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from stagekit.errors import UserError


def check_graph(gm: Any, example_inputs: Any, compile_fn: Any) -> None:
    """Raise UserError unless there are a graph, one example per input of it, and a function that compiles a bucket."""
    if not isinstance(gm, fx.GraphModule):
        raise UserError(
            f"gm is a {type(gm).__name__}; give a torch.fx.GraphModule, e.g. torch.fx.symbolic_trace(model), or hand the "
            "model to torch.compile with backend=stagekit.graph.bucket.backend(...)"
        )
    if not isinstance(example_inputs, Sequence) or isinstance(example_inputs, str):
        raise UserError(
            f"example_inputs is a {type(example_inputs).__name__}; give one value per graph input as a list"
        )
    inputs = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    if len(example_inputs) != len(inputs):
        raise UserError(
            f"example_inputs holds {len(example_inputs)} values, but the graph takes {len(inputs)} "
            f"({', '.join(inputs) or 'none'}); give one per input, in this order"
        )
    if not callable(compile_fn):
        raise UserError(
            f"compile_fn is {compile_fn!r}; give a function (graph module, inputs) -> callable; "
            "stagekit.graph.bucket.backend(inner=...) takes the name of a compiler"
        )


def check_ignored(ignored: Any) -> None:
    """Raise UserError unless `ignored` holds parameters and names."""
    is_collection = isinstance(ignored, Collection) and not isinstance(ignored, str | Tensor)
    wrong = [] if not is_collection else [item for item in ignored if not isinstance(item, str | nn.Parameter)]
    if not is_collection or wrong:
        shown = repr(wrong[0]) if wrong else f"a {type(ignored).__name__}"
        raise UserError(f"ignored {'holds' if wrong else 'is'} {shown}; give a list of parameters, or of their names")


def check_names(ignored: Collection[str | nn.Parameter], known: Iterable[str]) -> None:
    """Raise UserError for an ignored name that is no parameter of the graph: it would be counted silently."""
    names = sorted(set(known))
    unknown = [name for name in ignored if isinstance(name, str) and name not in names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, 3, 0.4) or names[:3]
        raise UserError(
            f"ignored names {', '.join(map(repr, unknown))}, but the graph has no such parameter; "
            f"nearest: {', '.join(near) or 'it has none at all'}"
        )


def checked_result(compiled: Any, of: str) -> Callable[..., Any]:
    """Return what compile_fn gave for `of`. Raises UserError if that can't be called."""
    if not callable(compiled):
        raise UserError(f"compile_fn returned {compiled!r} for {of}; return what is called instead of the graph")
    function: Callable[..., Any] = compiled
    return function
