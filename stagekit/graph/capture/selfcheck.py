"""Does the captured graph compute what the model computes? Asked once, when a plan is made, never on a worker.

By values where four times the model's bytes fit into 2 GiB and into half of the free memory: outputs, every gradient by
name and every buffer, of two calls and of calls with other values of what forward counts in attributes, on copies, from one
seed. Else structurally, on fake tensors: each output has the same shape, dtype and reached parameters, and no custom
autograd.Function is lost; values stay unchecked, and the plan says `self-check: structural`. Called by graph.capture.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from stagekit.errors import CaptureError
from stagekit.graph.capture.copies import in_mode, skeleton_of, twin_of
from stagekit.graph.capture.counters import (
    Attributes,
    changed_between,
    name_of,
    other_values,
    plain_attributes,
    put,
    turning_points,
)
from stagekit.graph.capture.draws import ConstantDraws
from stagekit.graph.capture.functions import FunctionRecorder
from stagekit.graph.capture.later import other_calls
from stagekit.graph.capture.lines import line_of_error
from stagekit.graph.capture.precision import autocast
from stagekit.graph.capture.quirks import without_value_checks
from stagekit.graph.capture.specs import Leaf
from stagekit.graph.passes.propagate import autograd_nodes, entered, takes_gradient
from stagekit.graph.values.build import build_for_real, named_tensors
from stagekit.plan.contract import Symbol

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured

_BUDGET_BYTES = 2 << 30  # for four copies; a larger model would also compute for minutes on a core
_FLOOR = 1e-6  # of the model's largest gradient: a bias before BatchNorm has a gradient of rounding errors only
_RELATIVE = 1e-4  # of a tensor's largest element: functional twins and cleared strides may change sums slightly
_VALUES = (
    "look for values that Python read or computed in forward (.item(), .data, a list), gradients switched on or off by "
    "hand, and a custom autograd.Function"
)
_BACKWARD = "; or for random numbers that a torch.library operator draws in its backward: draw them in its forward"
_STATE = "look for state kept outside of parameters and buffers: register it as a buffer and compute with torch"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a capture was checked ("values …" or "structural"), and the smallest size of each symbol that it holds for."""

    kind: str
    minimum: Mapping[str, int]


def self_check(
    captured: Captured, model: nn.Module | Callable[[], nn.Module], leaves: list[Leaf], seed: int
) -> Verdict:
    """Return how the capture was checked; raise CaptureError naming the first thing that differs.

    Export does not look at size 1, where models may take another branch (`if x.shape[0] > 1`) or refuse (BatchNorm): a
    symbol goes down to 1 only where the example or a second check at that size says so.
    """
    needed = 4 * sum(t.numel() * t.element_size() for t in captured.tensors.values())
    on_target = captured.device == "cpu" or torch.get_device_module(captured.device).is_available()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if on_target and needed <= min(_BUDGET_BYTES, free // 2):
        reference = twin_of(model) if isinstance(model, nn.Module) else build_for_real(model, seed)
        if not isinstance(model, nn.Module) and captured.source.equals_build:
            _check_start(captured, reference)
        reference = in_mode(reference.to(captured.device), captured.training)
        values = [leaf.value for leaf in leaves]
        changed = _check_values(captured, twin_of(reference), values, seed)
        kind = f"values; forward changes {changed}: tried in further calls, burned in beyond" if changed else "values"
        return Verdict(kind, _smallest(captured, reference, values, seed))
    check_structure(captured, leaves)
    return Verdict("structural", {s.name: 1 if s.example == 1 else max(2, s.minimum) for s in _symbols(captured)})


def _symbols(captured: Captured) -> tuple[Symbol, ...]:
    return captured.symbols.symbols


def _smallest(captured: Captured, reference: nn.Module, values: list[Any], seed: int) -> dict[str, int]:
    """Return the smallest size of each symbol for which graph and model agree: 1, or export's own bound of 2."""
    found = {s.name: s.minimum for s in _symbols(captured)}
    open_ends = [s for s in _symbols(captured) if s.example > 1 and s.minimum == 1]
    for group in _together(open_ends):
        for narrowed in dict.fromkeys([tuple(group), *((symbol,) for symbol in group)]):
            if not _agrees_at_one(captured, reference, values, seed, narrowed):
                found |= {symbol.name: 2 for symbol in narrowed}
            else:
                found |= {symbol.name: 1 for symbol in narrowed}
                if len(narrowed) == len(group):
                    break
    return found


def _together(symbols: list[Symbol]) -> list[list[Symbol]]:
    """Group the symbols that a smaller chunk changes at once: the batch of all inputs, sequences of one length."""
    groups: dict[tuple[bool, int], list[Symbol]] = {}
    for symbol in symbols:
        groups.setdefault((symbol.is_batch, 0 if symbol.is_batch else symbol.example), []).append(symbol)
    return list(groups.values())


def _agrees_at_one(
    captured: Captured, reference: nn.Module, values: list[Any], seed: int, symbols: tuple[Symbol, ...]
) -> bool:
    names = {symbol.name for symbol in symbols}
    narrowed = []
    for given, value in zip(captured.inputs, values, strict=True):
        for dim, size in enumerate(given.tensor.shape if given.tensor else ()):
            if size in names:
                value = value.narrow(dim, 0, 1)
        narrowed.append(value)
    try:
        _check_values(captured, twin_of(reference), narrowed, seed)
    except Exception:  # the model's own refusal of that size counts as much as a difference
        return False
    return True


def _check_values(captured: Captured, reference: nn.Module, given: list[Any], seed: int) -> str:
    """Compare `reference`, which is used up, with the graph on its tensors, in several calls: state shows in later ones.

    Returns the names of the attributes that change from call to call.
    """
    twin = twin_of(reference)
    _check_call(captured, reference, twin, given, seed, "")
    before = plain_attributes(reference)
    _check_call(captured, reference, twin, given, seed + 1, "in a second call, ")
    after = plain_attributes(reference)
    for values in turning_points(before, after, functools.partial(_tried, captured, reference, given)):
        put(reference, values)
        shown = ", ".join(f"{name_of(place)} = {value}" for place, value in values.items())
        _check_call(captured, reference, twin, given, seed + 2, f"in a later call, with {shown} before it, ")
    changed = changed_between(before, after)
    names = ", ".join(map(name_of, changed))
    if changed:
        call = functools.partial(_called, captured, given)
        for number, values in other_calls(twin_of(reference), call, {p: before[p] for p in changed}):
            put(reference, values)
            _check_call(
                captured, reference, twin, given, seed + 2, f"in call {number}, with what forward keeps in {names}, "
            )
    for values in other_values(before, after):
        put(reference, values)
        _check_call(captured, reference, twin, given, seed + 3, f"once forward has changed {names} further, ")
    return names


def _tried(captured: Captured, reference: nn.Module, given: list[Any], values: Attributes) -> None:
    """Run the forward of a copy of `reference` with other attributes."""
    copied = twin_of(reference)
    put(copied, values)
    with torch.no_grad(), contextlib.suppress(Exception):  # what it compares before it fails counts as well
        _called(captured, given, copied)


def _called(captured: Captured, given: list[Any], module: nn.Module) -> None:
    """Run the forward of `module`."""
    args, kwargs = pytree.tree_unflatten([_copy_input(value, captured.device) for value in given], captured.in_tree)
    with autocast(captured.precision, captured.device):
        module(*args, **kwargs)


def _check_call(
    captured: Captured, reference: nn.Module, twin: nn.Module, given: list[Any], seed: int, when: str
) -> None:
    """Compare outputs, gradients and buffers of one step of `reference` and of the graph on `twin`'s tensors."""
    for module in (reference, twin):
        module.zero_grad(set_to_none=True)
    values, inputs = ([_copy_input(value, captured.device) for value in given] for _ in range(2))
    args, kwargs = pytree.tree_unflatten(inputs, captured.in_tree)
    torch.manual_seed(seed)
    region = autocast(captured.precision, captured.device)
    with (
        torch.enable_grad(),
        _in_words(f"{when}the model itself fails on the example inputs, which are one chunk"),
        region,
    ):
        expected = pytree.tree_leaves(reference(*args, **kwargs))
    _check_real(expected)
    torch.manual_seed(seed)
    with torch.enable_grad():
        got = run_flat(captured, dict(named_tensors(twin)), values)
    _compare(f"{when}output", dict(enumerate(expected)), dict(enumerate(got)))
    with _in_words(f"{when}the model itself fails in backward on the example inputs"):
        _backward(expected)
    with _in_words(f"{when}the capture fails in backward, where the model does not"):
        _backward(got)
    gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (reference, twin)]
    floor = _FLOOR * max((_largest(gradient) for gradient in gradients[0].values()), default=0.0)
    _compare(f"{when}gradient of", gradients[0], gradients[1], floor)
    _compare(f"{when}gradient of", _input_gradients(captured, inputs), _input_gradients(captured, values))
    _compare(f"{when}buffer", dict(reference.named_buffers()), dict(twin.named_buffers()))


def _check_real(outputs: list[Any]) -> None:
    """Refuse a model that computes with tensors of the capture itself, which have no values."""
    if any(isinstance(output, FakeTensor) for output in outputs):
        raise CaptureError(
            "forward keeps tensors outside of the model (in a list, a closure, a cache), and the capture filled it with "
            "tensors without values; make them buffers of the model or compute them in every call, and empty it before "
            "the model runs again"
        )


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CaptureError(f"{what}{line_of_error(error)}: {type(error).__name__}: {error}") from error


def _input_gradients(captured: Captured, leaves: list[Any]) -> dict[str, Any]:
    return {
        given.name: leaf.grad
        for given, leaf in zip(captured.inputs, leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }


def _check_start(captured: Captured, reference: nn.Module) -> None:
    """The recorder must give what the constructor gives, bit for bit."""
    real = dict(named_tensors(reference))
    made = captured.source.take(list(captured.tensors))
    for name, value in made.items():
        if name not in real or not _identical(value, real[name]):
            raise CaptureError(
                f"{name}: the recorded constructor does not give the value that build_model() gives; does it draw "
                "random numbers outside of torch's default generator, or differ from call to call?"
            )


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _copy_input(value: Any, device: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)


def run_flat(captured: Captured, tensors: dict[str, Tensor], leaves: list[Any]) -> list[Any]:
    """Run the captured graph on the given parameters, buffers and graph inputs; return the output's leaves."""
    values: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            origin = captured.origins[node.name]
            if origin.kind == "input":
                values[node] = leaves[origin.index]
            else:
                values[node] = tensors[origin.name] if origin.name in tensors else captured.lifted[origin.name]
        elif node.op == "output":
            return pytree.tree_leaves(fx.map_arg(node.args[0], lambda n: values[n]))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            with entered(node.meta.get("context", ())):
                values[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph without an output node")


def _backward(outputs: list[Any]) -> None:
    """Backpropagate a fixed random cotangent over the float outputs that need one."""
    generator = torch.Generator().manual_seed(20)
    reached = [out for out in outputs if takes_gradient(out)]
    cotangents = [torch.randn(out.shape, generator=generator).to(out) for out in reached]
    if reached:
        torch.autograd.backward(reached, cotangents)


def _compare(what: str, expected: dict[Any, Any], got: dict[Any, Any], floor: float = 0.0) -> None:
    """Compare by name: a difference counts beyond a fraction of a tensor's largest element, and beyond `floor`."""
    for name, value in expected.items():
        other = got.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            a, b = _comparable(value), _comparable(other)
            is_like = (a.shape, value.dtype) == (b.shape, other.dtype)
            limit = max(_RELATIVE * _largest(value), floor)
            if is_like and torch.allclose(a, b, rtol=0.0, atol=limit, equal_nan=True):
                continue
            text = f"differs by {float((a - b).abs().max()):.3g}" if is_like else "has another shape or dtype"
        elif type(value) is type(other) and value == other:
            continue
        else:
            text = f"is {_word(other)} instead of {_word(value)}"
        hint = _STATE if " call" in what or "further, " in what else _VALUES
        if hint is _VALUES and "gradient" in what:
            hint += _BACKWARD
        raise CaptureError(f"the capture does not compute what the model computes: {what} {name} {text}; {hint}")


def _comparable(value: Tensor) -> Tensor:
    """Return floats of at least 32 bits as they are, anything else in 64: a copy of the largest tensor is large."""
    if value.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        return value.detach()
    return value.detach().double()


def _largest(value: Any) -> float:
    """Return the largest finite magnitude in a tensor, 0 for anything else."""
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    return float(_comparable(value).abs().double().nan_to_num(posinf=0, neginf=0).max())


def _word(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def check_structure(captured: Captured, leaves: list[Leaf]) -> None:
    """Compare, on fake tensors, which parameters the model and its capture reach; raise CaptureError."""
    skeleton = skeleton_of(captured.module, captured.mode, captured.device, captured.training)
    with captured.mode:
        values = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=captured.device)
            if isinstance(v, Tensor)
            else v
            for v in (leaf.value for leaf in leaves)
        ]
        args, kwargs = pytree.tree_unflatten(values, captured.in_tree)
        region = autocast(captured.precision, captured.device)
        with without_value_checks(), ConstantDraws(), FunctionRecorder(skeleton), region:
            expected = pytree.tree_leaves(skeleton(*args, **kwargs))
        lifted = {name: captured.mode.from_tensor(t) for name, t in captured.lifted.items()}
        got = run_flat(captured, {**lifted, **dict(named_tensors(skeleton))}, values)
    lost = _reached(expected)[1] - _reached(got)[1]
    if lost:
        raise CaptureError(
            f"{', '.join(sorted(lost))}: a custom autograd.Function that the capture does not hold; its backward would "
            "be lost"
        )
    names = {id(p): name for name, p in skeleton.named_parameters()}
    if len(expected) != len(got):
        raise CaptureError(f"the model returns {len(expected)} values, its capture {len(got)}")
    for index, (theirs, ours) in enumerate(zip(expected, got, strict=True)):
        _compare_structure(index, theirs, ours, names)


def _compare_structure(index: int, theirs: Any, ours: Any, names: Mapping[int, str]) -> None:
    """Compare output number `index`: what it is, and which parameters its gradient reaches."""
    shown = [(tuple(t.shape), t.dtype, t.requires_grad) if isinstance(t, Tensor) else t for t in (theirs, ours)]
    if shown[0] != shown[1]:
        raise CaptureError(
            f"the capture does not compute what the model computes: output {index} is {shown[1]} instead of {shown[0]} "
            "(shape, dtype, has a gradient)"
        )
    difference = _reached([theirs])[0] ^ _reached([ours])[0]
    if difference:
        first = min(names.get(i, "an input") for i in difference)
        raise CaptureError(
            f"the model and its capture do not reach the same parameters from output {index}; the first one is {first}"
        )


def _reached(outputs: list[Any]) -> tuple[set[int], Counter[str]]:
    """Return the ids of the leaves that autograd reaches, and how often each autograd node that is not torch's own."""
    roots = [out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None]
    found: set[int] = set()
    foreign: Counter[str] = Counter()
    for node in autograd_nodes(roots):
        if issubclass(type(node), torch.autograd.function.BackwardCFunction):
            foreign[node.name()] += 1
        if hasattr(node, "variable"):
            found.add(id(node.variable))
    return found, foreign
