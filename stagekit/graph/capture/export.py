"""How a model becomes an exported program: fake tensors on the target device, symbolic sizes, static where that fails.

`export_model` copies the module onto fake tensors and exports it (non-strict, training IR). What the graph's inputs,
outputs and names are is decided in graph.capture, which calls this; flat graphs are made in graph.passes.normalise.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from stagekit.errors import CaptureError
from stagekit.graph.capture.copies import skeleton_of
from stagekit.graph.capture.draws import ConstantDraws
from stagekit.graph.capture.fixed import NotedSizes, fixed_sizes
from stagekit.graph.capture.functions import FunctionRecorder
from stagekit.graph.capture.lines import is_torch_internal
from stagekit.graph.capture.modes import NotedModes
from stagekit.graph.capture.precision import FP32, autocast
from stagekit.graph.capture.quirks import (
    RecordedAsOperators,
    answering_compiling,
    modules_stay,
    quiet,
    without_value_checks,
)
from stagekit.graph.capture.refusals import check_module, is_about_values, refusal, watched
from stagekit.graph.capture.specs import Leaf, example_rows, register_dataclasses, symbolic_dims
from stagekit.plan.contract import FixedSize


@dataclass(frozen=True)
class Exported:
    """An exported program, the mode of its fake tensors, and the fake copy of the module that was exported.

    `calls` are the calls of custom autograd.Functions, which the program holds by number. `guards` are the conditions
    over sizes that the model's own branches put (`if length % 2 == 0`): beyond them it is another model.
    `compiled_branch`: by what call and where forward asked whether it is compiled and heard yes. `fixed`: why a size that should be
    symbolic is not.
    """

    program: torch.export.ExportedProgram
    mode: FakeTensorMode
    skeleton: nn.Module
    calls: tuple[Callable[..., Any], ...]
    guards: tuple[sympy.Basic, ...]
    compiled_branch: str = ""
    fixed: tuple[FixedSize, ...] = ()


def export_model(
    module: nn.Module,
    leaves: Sequence[Leaf],
    in_tree: Any,
    split_dims: Sequence[int | None],
    device: str,
    training: bool | None = None,
    precision: str = FP32,
) -> Exported:
    """Export with as many symbolic sizes as the model allows: all, else the batch, else none.

    Raises CaptureError with the user's line and what to do.
    """
    check_module(module)
    failure: Exception | None = None
    values_matter = False
    asked: list[str] = []
    for kept, compiling in itertools.product(("all", "batch", "none"), (True, False)):
        if values_matter and kept == "batch":
            continue  # what looks at values may at most look at sizes made into tensors, which static ones settle
        if not compiling and not asked:
            continue  # the model has no other branch
        mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        skeleton = skeleton_of(module, mode, device, training)
        try:
            symbolic = _symbolic(leaves, split_dims, kept)
            values = [
                _fake_input(leaf.value, dim if dim in dims else None, mode, device)
                for leaf, dim, dims in zip(leaves, split_dims, symbolic, strict=True)
            ]
            with answering_compiling(compiling, asked), NotedSizes() as noted:
                program, calls = _exported(skeleton, values, in_tree, symbolic, autocast(precision, device))
        except CaptureError:
            raise
        except Exception as error:
            told = failure is not None and (compiling or is_about_values(failure))
            failure = failure if told else error  # of the branch that eager takes, where there are two
            values_matter = values_matter or is_about_values(error)
            continue
        fakes = _mode_of(program)
        branch = asked[0] if asked and compiling else ""
        wanted = _symbolic(leaves, split_dims, "all")
        fixed = fixed_sizes(skeleton, leaves, wanted, _given(program, len(leaves)), noted.lines, failure)
        return Exported(program, fakes, skeleton, calls, _branches(fakes), branch, fixed)
    assert failure is not None
    raise refusal(module, failure) from failure


def _symbolic(leaves: Sequence[Leaf], split_dims: Sequence[int | None], kept: str) -> list[list[int]]:
    """Return per leaf the dimensions to keep symbolic."""
    if kept == "none":
        return [[] for _ in leaves]
    found = [
        symbolic_dims(leaf.value, dim) if isinstance(leaf.value, Tensor) else []
        for leaf, dim in zip(leaves, split_dims, strict=True)
    ]
    if kept == "all":
        return found
    return [[dim for dim in dims if dim == batch] for dims, batch in zip(found, split_dims, strict=True)]


def _exported(
    skeleton: nn.Module,
    values: Sequence[Any],
    in_tree: Any,
    symbolic: Sequence[Sequence[int]],
    region: AbstractContextManager[Any],
) -> tuple[torch.export.ExportedProgram, tuple[Callable[..., Any], ...]]:
    fake_args, fake_kwargs = pytree.tree_unflatten(list(values), in_tree)
    hints = [
        dict.fromkeys(dims, torch.export.Dim.AUTO) if isinstance(value, Tensor) else None
        for value, dims in zip(values, symbolic, strict=True)
    ]
    _name_keywords(skeleton, fake_kwargs)
    shapes = _by_name(skeleton, _shapes_of((fake_args, fake_kwargs), iter(hints))) if any(symbolic) else None
    skeleton.register_forward_hook(lambda _, __, output: register_dataclasses(output))
    with (
        warnings.catch_warnings(),
        torch.enable_grad(),
        NotedModes(),
        region,  # after what notes it: seen from there, every node lies in it
        without_value_checks(),
        quiet(),
        modules_stay(),
        watched(),
        ConstantDraws(),
        RecordedAsOperators(),
        FunctionRecorder(skeleton) as functions,
    ):
        # of recurrent layers' own lists; what matters is found by the self-check's second call
        warnings.filterwarnings("ignore", "The tensor attribute")
        program = torch.export.export(skeleton, fake_args, fake_kwargs, strict=False, dynamic_shapes=shapes)
    return program, tuple(functions.calls)


def _given(exported: torch.export.ExportedProgram, count: int) -> list[Any]:
    """Return the fake value of each user input, None where export left out a constant."""
    held = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return [held.get(name) for name in names][:count]


def _mode_of(exported: torch.export.ExportedProgram) -> FakeTensorMode:
    """Return the mode of the exported graph's values: export moves them into one of its own."""
    values = (node.meta.get("val") for node in exported.graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        raise CaptureError("the capture holds no tensor at all; does forward compute anything?")
    return mode


def _branches(mode: FakeTensorMode) -> tuple[sympy.Basic, ...]:
    """Return the conditions that Python code of the model or of torch.nn decided on.

    Others come from torch's own shape functions. They choose how a fake tensor is laid out, not what the graph holds, and
    a size for which the operator itself does not work fails when it runs; how many pieces `chunk` gives is in
    graph.capture.lists.
    """
    shapes = mode.shape_env
    assert shapes is not None
    return tuple(
        shapes.replace(guard.expr)
        for guard in shapes.guards
        if not is_torch_internal(getattr(guard.sloc.framework_loc, "filename", ""))
    )


def _fake_input(value: Any, batch_dim: int | None, mode: FakeTensorMode, device: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = example_rows(value, batch_dim)
    with mode:
        if shape == value.shape:
            fake = torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=device)
        else:
            fake = torch.empty(shape, dtype=value.dtype, device=device)
    return fake.requires_grad_(value.requires_grad)


def _by_name(module: nn.Module, shapes: Any) -> Any:
    """Return the dynamic shapes keyed as export wants them: by the forward's argument names."""
    positional, named = shapes
    parameters = list(inspect.signature(module.forward).parameters.values())
    result: dict[str, Any] = {}
    rest = list(positional)
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            if rest:
                result[parameter.name] = tuple(rest)
            rest = []
        elif rest and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            result[parameter.name] = rest.pop(0)
    return result | named


def _name_keywords(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Give forward(**kwargs) a signature that names `keywords`: export counts those of a **kwargs twice and gives up."""
    signature = inspect.signature(module.forward)
    given = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    named = {parameter.name for parameter in given}
    extra = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in keywords if key not in named]
    if not extra:
        return
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    forward.__signature__ = signature.replace(parameters=[*given, *extra])  # type: ignore[attr-defined]
    module.forward = forward


def _shapes_of(value: Any, hints: Iterator[Any]) -> Any:
    """Return the hints of a tree's leaves as export wants them: in lists where the tree holds a dataclass."""
    node_type = pytree._get_node_type(value)
    if node_type not in pytree.SUPPORTED_NODES:
        return next(hints)
    children, context = pytree.SUPPORTED_NODES[node_type].flatten_fn(value)
    shapes: Any = [_shapes_of(child, hints) for child in children]
    if node_type in pytree.BUILTIN_TYPES:
        return pytree.SUPPORTED_NODES[node_type].unflatten_fn(shapes, context)
    return type(children)(shapes)
