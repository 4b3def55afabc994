"""How a model becomes an exported program: fake tensors on the target device, symbolic sizes, static where that fails.

`export_model` copies the module onto fake tensors and exports it (non-strict, training IR). What the graph's inputs,
outputs and names are is decided in graph.capture, which calls this; flat graphs are made in graph.normalise.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from stagekit.errors import CaptureError
from stagekit.graph.build import named_tensors
from stagekit.graph.functions import FunctionRecorder
from stagekit.graph.lines import is_torch_internal, line_of_error
from stagekit.graph.quirks import without_value_checks
from stagekit.graph.specs import Leaf, example_rows, symbolic_dims


@dataclass(frozen=True)
class Exported:
    """An exported program, the mode of its fake tensors, and the fake copy of the module that was exported.

    `calls` are the calls of custom autograd.Functions, which the program holds by number. `guards` are the conditions
    over sizes that the model's own branches put (`if length % 2 == 0`): beyond them it is another model.
    """

    program: torch.export.ExportedProgram
    mode: FakeTensorMode
    skeleton: nn.Module
    calls: tuple[Callable[..., Any], ...]
    guards: tuple[sympy.Basic, ...]


def in_mode(module: nn.Module, training: bool | None) -> nn.Module:
    """Return `module` after train(training); None leaves every submodule's own flag as it is."""
    return module if training is None else module.train(training)


def skeleton_of(module: nn.Module, mode: FakeTensorMode, device: str, training: bool | None = None) -> nn.Module:
    """Return a copy of `module` whose parameters, buffers and tensor attributes are fake tensors on `device`."""
    memo: dict[int, Any] = {}
    for _, tensor in named_tensors(module):
        if id(tensor) in memo:
            continue
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    try:
        return in_mode(copy.deepcopy(module, memo), training)
    except Exception as error:
        raise CaptureError(f"{type(module).__name__} can't be copied: {type(error).__name__}: {error}") from error


def export_model(
    module: nn.Module,
    leaves: Sequence[Leaf],
    in_tree: Any,
    split_dims: Sequence[int | None],
    device: str,
    training: bool | None = None,
) -> Exported:
    """Export with symbolic sizes, or with static ones if that fails. Raises CaptureError with the user's line."""
    failure: Exception | None = None
    for symbolic in (True, False):
        mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        skeleton = skeleton_of(module, mode, device, training)
        values = [
            _fake_input(leaf.value, dim, mode, device, symbolic) for leaf, dim in zip(leaves, split_dims, strict=True)
        ]
        fake_args, fake_kwargs = pytree.tree_unflatten(values, in_tree)
        dims = [_dynamic(value, dim) if symbolic else None for value, dim in zip(values, split_dims, strict=True)]
        shapes = pytree.tree_unflatten(dims, in_tree)
        try:
            with without_value_checks(), FunctionRecorder(skeleton) as functions:
                exported = torch.export.export(
                    skeleton,
                    fake_args,
                    fake_kwargs,
                    strict=False,
                    dynamic_shapes=_by_name(skeleton, shapes) if symbolic else None,
                )
            fakes = _mode_of(exported)
            return Exported(exported, fakes, skeleton, tuple(functions.calls), _branches(fakes))
        except CaptureError:
            raise
        except Exception as error:
            failure = error
    assert failure is not None
    raise CaptureError(
        f"{type(module).__name__} can't be captured{line_of_error(failure)}: {type(failure).__name__}: "
        f"{str(failure).splitlines()[0] if str(failure) else ''}"
    ) from failure


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
    a size for which the operator itself does not work fails when it runs.
    """
    shapes = mode.shape_env
    assert shapes is not None
    return tuple(
        shapes.replace(guard.expr)
        for guard in shapes.guards
        if not is_torch_internal(getattr(guard.sloc.framework_loc, "filename", ""))
    )


def _fake_input(value: Any, split_dim: int | None, mode: FakeTensorMode, device: str, symbolic: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = example_rows(value, split_dim) if symbolic else value.shape
    with mode:
        if shape == value.shape:
            fake = torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=device)
        else:
            fake = torch.empty(shape, dtype=value.dtype, device=device)
    return fake.requires_grad_(value.requires_grad)


def _dynamic(value: Any, split_dim: int | None) -> dict[int, Any] | None:
    if not isinstance(value, Tensor):
        return None
    return dict.fromkeys(symbolic_dims(value, split_dim), torch.export.Dim.AUTO)


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
    known = {p.name for p in parameters}
    var_keyword = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    extra = {key: value for key, value in named.items() if key not in known}
    result |= {key: value for key, value in named.items() if key in known}
    if var_keyword is not None and extra:
        result[var_keyword] = extra
    return result
