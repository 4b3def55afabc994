"""Custom autograd.Functions in a capture: each call is one node that calls the user's own class, so its backward is kept.

Export would trace through `forward` and lose `backward`. While `FunctionRecorder` is entered, every `apply` inside an
export is recorded as a node instead, and graph.passes.normalise puts the result of `function_call` there. Reentrant checkpoints, which are
autograd.Functions too, dissolve: recomputing is the runtime's. Called by graph.capture.export; graph.passes.aliasing asks `traits_of`.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from stagekit.errors import CaptureError
from stagekit.graph.capture.lines import is_ours, line_here
from stagekit.graph.values.build import named_tensors

_Leaf = Tensor | torch.SymInt | torch.SymFloat | torch.SymBool


@dataclass(frozen=True, slots=True)
class Traits:
    """What a recorded call does beside computing: the operands it writes, and whether it draws random numbers."""

    written: tuple[int, ...]
    draws: bool
    digest: str  # of the class and the constants: equal wherever the same code is captured
    function: type  # the class


def traits_of(target: Any) -> Traits | None:
    """Return the traits of a node's target if it is a recorded custom Function, else None."""
    found: Traits | None = getattr(target, "traits", None) if inspect.isfunction(target) else None
    return found


class _Recorded(HigherOrderOperator):
    """Stands for a call while export runs, which allows no plain functions as targets. Its first operand is a number."""

    def __init__(self) -> None:
        super().__init__("stagekit_custom_function")  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a recorded call is replaced before anything runs")


recorded = _Recorded()


class FunctionRecorder:
    """While entered, calls of custom Functions in an export are recorded; `calls` holds what each number stands for.

    Outside of an export they run as they are, but reentrant checkpoints dissolve there too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.calls: list[Callable[..., Any]] = []
        self._before: Any = None

    def __enter__(self) -> FunctionRecorder:
        recorder = self
        # the base class, not Function: `swish = Swish.apply` at import time holds on to Function.apply itself
        self._before = vars(_SingleLevelFunction).get("apply")

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder._apply(cls, args, kwargs)

        _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        else:
            _SingleLevelFunction.apply = self._before  # type: ignore[attr-defined]

    def _apply(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls is CheckpointFunction:
            return _dissolved_checkpoint(*args)
        mode = _recording_mode()
        if mode is None or kwargs:
            return _plain_apply(cls, *args, **kwargs)
        return self._record(mode, cls, args)

    def _record(self, mode: ProxyTorchDispatchMode, cls: Any, args: tuple[Any, ...]) -> Any:
        leaves, tree = pytree.tree_flatten(args)
        operands = [leaf for leaf in leaves if isinstance(leaf, _Leaf)]
        constants = [None if isinstance(leaf, _Leaf) else leaf for leaf in leaves]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _Leaf)]
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            written, draws = _dry_run(cls, args, self._module)
        digest = _digest(cls, constants)
        call = function_call(cls, tree, constants, places, Traits(written, draws, digest, cls))
        tracer: Any = mode.tracer
        proxies = [tracer.unwrap_proxy(operand) for operand in operands]
        name = re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", cls.__name__.strip("_")).lower()
        proxy = tracer.create_proxy("call_function", recorded, (len(self.calls), *proxies), {}, name=name)
        proxy.node.meta["stack_trace"] = _without_our_frames(proxy.node.meta.get("stack_trace"))
        self.calls.append(call)
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            result = _plain_apply(cls, *args)
        return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def _recording_mode() -> ProxyTorchDispatchMode | None:
    mode: ProxyTorchDispatchMode | None = torch._ops._get_dispatch_mode_pre_dispatch(
        torch._C._TorchDispatchModeKey.PROXY
    )
    return mode


def is_recording() -> bool:
    """Tell whether an export records the operations that run now: not those inside a custom Function."""
    return _recording_mode() is not None


def function_call(
    cls: Any, tree: Any, constants: Sequence[Any], places: Sequence[int], traits: Traits
) -> Callable[..., Any]:
    """Return a function of the tensors and sizes alone that applies `cls`, everything else burned in."""

    def call(*operands: Any) -> Any:
        leaves = list(constants)
        for place, operand in zip(places, operands, strict=True):
            leaves[place] = operand
        return cls.apply(*pytree.tree_unflatten(leaves, tree))

    call.__name__ = call.__qualname__ = cls.__name__
    call.__module__ = __name__  # fx prints a function of a module of torch's as the name, which is the class there
    vars(call)["traits"] = traits
    return call


def resolve(node: fx.Node, calls: Sequence[Callable[..., Any]]) -> None:
    """Turn a recorded node into a call of the function that its number stands for; other nodes stay."""
    if node.target is recorded:
        node.target, node.args = calls[int(node.args[0])], node.args[1:]  # type: ignore[arg-type]


def _plain_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, cls)(*args, **kwargs)


def _dissolved_checkpoint(run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Run a reentrant checkpoint's body in place; like the original it records no gradient unless an argument has one."""
    wanted = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    if wanted or not torch.is_grad_enabled():
        return run_function(*args)
    with torch.no_grad():
        return run_function(*args)


class _Watch(TorchDispatchMode):
    """Sees what a Function's forward and backward do to memory and generators."""

    def __init__(self, own: Sequence[Tensor], module: nn.Module, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {_memory(tensor) for tensor in own}
        self.written: set[int] = set()
        self.draws = False
        self.module, self.where = module, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor) and _memory(leaf) not in self.known:
                self._refuse(leaf)
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= {_memory(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.known |= {_memory(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _refuse(self, tensor: FakeTensor) -> None:
        names = (name for name, held in named_tensors(self.module) if _memory(held) == _memory(tensor))
        what = next(names, f"a tensor of shape {tuple(tensor.shape)}")
        raise CaptureError(
            f"{self.where} uses {what}, which is not among its arguments, so no stage would know that it needs it; "
            "pass every parameter, buffer and activation to apply()"
        )


def _memory(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _dry_run(cls: Any, args: tuple[Any, ...], module: nn.Module) -> tuple[tuple[int, ...], bool]:
    """Run forward and backward on fake copies; return which operands are written and whether it draws numbers."""
    twins = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad).clone(), args)
    operands = [leaf for leaf in pytree.tree_leaves(twins) if isinstance(leaf, _Leaf)]
    tensors = [leaf for leaf in operands if isinstance(leaf, Tensor)]
    where = f"autograd.Function {cls.__name__}{line_here()}"
    watch = _Watch(tensors, module, where)
    with watch:
        outputs = pytree.tree_leaves(_plain_apply(cls, *twins))
    draws = watch.draws
    written = tuple(i for i, leaf in enumerate(operands) if isinstance(leaf, Tensor) and _memory(leaf) in watch.written)
    roots = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if roots and wanted and torch.is_grad_enabled():
        watch.draws = False
        _dry_backward(watch, roots, wanted)
        if watch.draws:
            raise CaptureError(
                f"{where} draws random numbers in its backward, where no seed of ours reaches; draw them in forward "
                "and keep them with ctx.save_for_backward"
            )
    return written, draws


def _dry_backward(watch: _Watch, roots: list[Tensor], wanted: list[Tensor]) -> None:
    cotangents = [torch.ones_like(root) for root in roots]
    watch.known |= {_memory(tensor) for tensor in cotangents}
    try:
        with watch:
            torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)
    except CaptureError:
        raise
    except Exception:
        return  # it runs on real values only; nothing in a capture or a stage needs more


def _digest(cls: Any, constants: Sequence[Any]) -> str:
    """Return a digest that is equal in every process that has the same class and passes the same constants."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        source = ""
    text = repr((cls.__module__, cls.__qualname__, source, [_shown(value) for value in constants]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shown(value: Any, depth: int = 4) -> Any:
    """Return what a constant holds in a form whose repr has no address: attributes and items, a few levels down."""
    plain = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.memory_format)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, plain):
        return kind, repr(value)
    if isinstance(value, Tensor):
        return kind, tuple(map(str, value.shape)), str(value.dtype)
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if depth == 0:
        return kind
    if isinstance(value, list | tuple):
        return kind, [_shown(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(_shown(item, depth - 1)) for item in value)
    held = value if isinstance(value, dict) else _attributes(value)
    return kind, sorted((repr(_shown(key, depth - 1)), repr(_shown(item, depth - 1))) for key, item in held.items())


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    slots = [name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(getattr(value, "__dict__", {}))


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _without_our_frames(stack_trace: str | None) -> str | None:
    """Drop the innermost frames of a stack trace that are the recorder's."""
    if not stack_trace:
        return stack_trace
    entries = re.split(r"(?m)^(?=  File )", stack_trace)
    while len(entries) > 1 and (match := re.match(r'  File "([^"]+)"', entries[-1])) and is_ours(match.group(1)):
        entries.pop()
    return "".join(entries)
