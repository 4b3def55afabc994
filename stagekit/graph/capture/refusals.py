"""What a capture can't hold, in words: which line of the user's code, why, and what to do instead.

`check_module` looks at a module before anything runs; `refusal` turns the exception of a failed export into words;
`watched` refuses, while a model is exported, calls that would silently drop out of the graph. Called by graph.capture.export.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

from stagekit.errors import CaptureError
from stagekit.graph.capture.functions import is_recording
from stagekit.graph.capture.lines import is_ours, line_here, line_of_error
from stagekit.graph.values.build import named_tensors

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_BRANCH = (
    "decides on a value of a tensor, and a pipeline runs the same operations for every chunk; use torch.where or a mask, "
    "or decide on shapes or on arguments that are no tensors; drop an assert on values"
)
_SELECTS = (
    "makes a tensor whose size depends on values; a pipeline needs sizes that are known before a chunk runs: pad, or "
    "multiply by a mask instead of selecting"
)


_TAKES_SIZES = re.compile(r"\.(view|reshape|expand|repeat|unflatten|as_strided|narrow|zeros|ones|empty|full|arange)\(")


def unwrapped(model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """Return the model without the wrapper of torch.compile around it; stages are compiled by `compile=`."""
    if isinstance(model, nn.Module):
        original = getattr(model, "_orig_mod", None)
        return original if isinstance(original, nn.Module) else model
    build: Callable[[], nn.Module] = model

    @functools.wraps(build, updated=())
    def built() -> nn.Module:
        module = build()
        return getattr(module, "_orig_mod", module) if isinstance(module, nn.Module) else module

    return built


def check_module(module: nn.Module) -> None:
    """Raise CaptureError for a module whose training a capture would change or can't express."""
    name = type(module).__name__
    if name in _WRAPPERS:
        raise CaptureError(f"the model is wrapped in {name}; pass the module inside (model.module), replicas are ours")
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(f"{name} is a TorchScript module, which can't be captured; pass the nn.Module it came from")
    if nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks:
        raise CaptureError("a global module backward hook is registered; it would not run in a stage: remove it")
    for path, child in module.named_modules():
        _check_child(path or name, child)
    for path, tensor in module.named_parameters():
        _check_parameter(path, tensor)


def _check_child(path: str, child: nn.Module) -> None:
    if child._backward_hooks or child._backward_pre_hooks:
        raise CaptureError(
            f"{path} has a backward hook, which would not run in a stage; remove it, or write an autograd.Function"
        )
    if type(child).__module__.startswith("torch.ao.nn.quantized"):
        raise CaptureError(f"{path} is quantised ({type(child).__name__}) and has no gradients; pass the float model")
    if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
        raise CaptureError(f"{path} makes sparse gradients, which stages can't sum; build it with sparse=False")


def _check_parameter(path: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise CaptureError(f"{path} has no shape yet (a lazy module); run the model once, or give its sizes")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
        raise CaptureError(f"{path} is a {kind} tensor; a pipeline holds dense parameters: convert it with to_dense()")
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise CaptureError(
            f"{path} has a gradient hook, which would not run in a stage, where parameters are made anew; change the "
            "gradient in the optimizer, or write an autograd.Function"
        )


def is_about_values(error: BaseException) -> bool:
    """Tell whether export failed because the model looks at values: fewer symbolic sizes would not help."""
    return isinstance(
        error, GuardOnDataDependentSymNode | DataDependentOutputException | DynamicOutputShapeException | CaptureError
    )


def refusal(module: nn.Module, error: BaseException) -> CaptureError:
    """Return the words for an exception that ended the export of `module`."""
    head = f"{type(module).__name__} can't be captured{line_of_error(error)}{_source(error)}"
    text = str(error)
    first = text.splitlines()[0] if text else ""
    if "doesn't match mode" in text and "FakeTensorMode" in text:
        return CaptureError(f"{head}: {_outside(module)}")
    if "failed to unpack the object at pos" in text and "FakeTensor" in text:
        return CaptureError(
            f"{head}: a size is a tensor there, as in packed sequences (pack_padded_sequence), whose sizes depend on "
            "values; give the layer padded sequences and mask its outputs, or compute the size from shapes"
        )
    averages = next((path for path, child in module.named_modules() if _averages_all(child)), None)
    if averages is not None and isinstance(error, GuardOnDataDependentSymNode):
        return CaptureError(
            f"{head}: {averages} is a BatchNorm with momentum=None, which reads the number of batches in Python; give it "
            "a momentum"
        )
    looks = isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException)
    if looks and _is_in_distributions(error):
        return CaptureError(
            f"{head}: torch.distributions checks the values that it is given; pass validate_args=False to the distribution"
        )
    if looks and _TAKES_SIZES.search(_expression(error)):
        return CaptureError(
            f"{head}: a size may be a tensor there, as torch.div(size, 2) gives one; compute sizes with Python's +, -, *, //. "
            f"Otherwise it {_BRANCH}"
        )
    if looks:
        return CaptureError(f"{head}: it {_BRANCH}")
    if isinstance(error, DynamicOutputShapeException):
        return CaptureError(f"{head}: it {_SELECTS}")
    if "numpy() is not supported" in text or ("numpy" in text and isinstance(error, TypeError | RuntimeError)):
        return CaptureError(
            f"{head}: it leaves torch for NumPy, where no gradient and no capture follows; use torch's functions, or "
            "make it an operator with torch.library.custom_op"
        )
    if found := re.search(r"Found <class '([^']+)'> in output", text):
        return CaptureError(
            f"{type(module).__name__} returns a {found.group(1)}; return tensors, numbers, strings, None, or tuples, "
            "lists, dicts and dataclasses of them"
        )
    return CaptureError(f"{head}: {type(error).__name__}: {first}")


def _outside(module: nn.Module) -> str:
    """Say which tensors are neither parameters nor buffers of `module` and may be what an in-place write mixed in."""
    registered = {id(t) for t in (*module.parameters(), *module.buffers())}
    names = [name for name, tensor in named_tensors(module) if id(tensor) not in registered]
    what = f"{', '.join(names)} of {type(module).__name__}" if names else "a tensor"
    return (
        f"{what} is written in forward and is neither a parameter nor a buffer, so no stage would own it; register it as "
        "a buffer: self.register_buffer(name, tensor)"
    )


def _averages_all(child: nn.Module) -> bool:
    return isinstance(child, nn.modules.batchnorm._NormBase) and child.momentum is None and child.track_running_stats


def _is_in_distributions(error: BaseException) -> bool:
    return any("/torch/distributions/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _own_frame(error: BaseException) -> traceback.FrameSummary | None:
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_ours(frame.filename)]
    return own[-1] if own else None


def _source(error: BaseException) -> str:
    frame = _own_frame(error)
    line = linecache.getline(frame.filename, frame.lineno or 0).strip() if frame else ""
    return f" ({line})" if line else ""


def _expression(error: BaseException) -> str:
    """Return the part of the user's line that was being evaluated: a branch, not what stands in its arms."""
    frame = _own_frame(error)
    if frame is None:
        return ""
    line = linecache.getline(frame.filename, frame.lineno or 0).encode()
    ends_here = frame.end_lineno == frame.lineno
    return line[frame.colno : frame.end_colno if ends_here else None].decode(errors="replace")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Refuse what would run once, at capture, and then be missing from the graph; restore everything after."""
    hook = (
        "a gradient hook is registered on a tensor",
        "it would be lost: write an autograd.Function whose backward changes the gradient",
    )
    gradient = (
        "gradients are computed inside forward",
        "the capture does not see that: write the derivative out, or compute it in an autograd.Function",
    )
    replaced = [
        (Tensor, "register_hook", hook),
        (Tensor, "register_post_accumulate_grad_hook", hook),
        (torch.autograd, "grad", gradient),
        (torch.autograd, "backward", gradient),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    drawn = _foreign_generators()
    try:
        for (owner, name, words), (_, _, original) in zip(replaced, originals, strict=True):
            setattr(owner, name, _refusing(original, *words))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        changed = [name for name, state in _foreign_generators().items() if state != drawn.get(name, state)]
        _restore(drawn)
    if changed:
        raise CaptureError(
            f"forward draws random numbers from {changed[0]}, so they would be the same in every step; draw them with "
            "torch, and drop a layer by multiplying with a random mask"
        )


def _refusing(original: Callable[..., Any], what: str, instead: str) -> Callable[..., Any]:
    """Return a function that refuses where nodes are recorded; inside a custom Function it is the original."""

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_recording():
            raise CaptureError(f"{what}{line_here()}; {instead}")
        return original(*args, **kwargs)

    return refuse


def _foreign_generators() -> dict[str, Any]:
    """Return the states of generators that are not torch's: Python's, and NumPy's if it is loaded."""
    states: dict[str, Any] = {"Python's random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random module"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in states:
        name, keys, *rest = states["numpy.random"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
