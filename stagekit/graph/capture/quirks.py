"""Where torch leaves the way that a capture follows: looks at values, `.data`, `random_`, `is_compiling()`, printed graphs.

nn.Transformer compares a mask with the causal one and gives attention a hint if they are equal; without the hint the
mask itself is applied, which is the same sum. `.data` is no operation that export sees; `.detach()` gives the same tensor.
A model that asks whether it is compiled may take another branch then; export says yes, and where that can't be captured,
the eager branch is tried. graph.capture.export enters `without_value_checks`, `quiet`, `answering_compiling`, `modules_stay`
and `RecordedAsOperators`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import _trace
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from stagekit.errors import CaptureError
from stagekit.graph.capture.functions import is_recording
from stagekit.graph.capture.lines import is_ours, line_here


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


_QUESTIONS = (("torch.compiler", "is_compiling"), ("torch.compiler", "is_exporting"), ("torch._dynamo", "is_compiling"))


@contextlib.contextmanager
def answering_compiling(answer: bool, asked: list[str]) -> Iterator[None]:
    """Let the model (not torch itself) hear `answer` from torch.compiler.is_compiling() and its like.

    Where it asks what is noted in `asked`.
    """
    found = [(sys.modules[module], name, f"{module}.{name}()") for module, name in _QUESTIONS if module in sys.modules]
    originals = [(module, name, getattr(module, name)) for module, name, _ in found]
    try:
        for module, name, shown in found:
            setattr(module, name, _answering(getattr(module, name), shown, answer, asked))
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def _answering(original: Callable[[], bool], shown: str, answer: bool, asked: list[str]) -> Callable[[], bool]:
    def question() -> bool:
        if is_ours(sys._getframe(1).f_code.co_filename):
            return original()
        asked.append(f"{shown}{line_here()}")
        return answer and original()

    return question


def _as_told(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
    return is_causal is True


_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_CONVERT = ("to", *_DTYPES, "cpu", "cuda", "type")


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """Make `module.to(...)`, `.float()`, `.cpu()` in forward the module itself where they change nothing.

    On fake tensors torch's own fail. What would change weights is refused.
    """
    originals = {name: getattr(nn.Module, name) for name in _CONVERT}
    try:
        for name in _CONVERT:
            setattr(nn.Module, name, _staying(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.Module, name, original)


def _staying(name: str) -> Any:
    def convert(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, layout = _wanted(name, args, kwargs)
        for tensor in (*module.parameters(), *module.buffers()):
            moved = device is not None and torch.device(device).type != tensor.device.type
            cast = dtype not in (None, tensor.dtype) and (tensor.is_floating_point() or name == "type")
            if moved or layout is not None or cast:
                raise CaptureError(
                    f"{type(module).__name__}.{name}() changes weights in forward{line_here()}; call it where the model "
                    "is built, or convert the activations"
                )
        return module

    return convert


def _wanted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the device, dtype and memory format that a conversion asks for, None where it leaves them."""
    if name in _DTYPES:
        return None, _DTYPES[name], None
    if name in ("cpu", "cuda"):
        return name, None, None
    if name == "type":
        wanted = (*args, *kwargs.values())[0]
        return None, wanted if isinstance(wanted, torch.dtype) else torch.empty(0).type(wanted).dtype, None
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, layout


class RecordedAsOperators(TorchFunctionMode):
    """While entered, an export records `x.data` as `x.detach()` and refuses to assign it.

    `x.random_(low, high)` is recorded as `x.random_(high - low).add_(low)`, the same numbers: printed graphs name the
    operator's arguments, and one of them is called `from`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__get__ and is_recording():  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__ and is_recording():  # type: ignore[attr-defined]
            raise CaptureError(
                f".data of a tensor is assigned in forward{line_here()}, which no capture sees; write the tensor under "
                "torch.no_grad(): with copy_(), add_() or mul_()"
            )
        if func is Tensor.random_ and is_recording():
            return _random(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _random(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    generator = kwargs.pop("generator", None)
    low, high = (*args, *(kwargs[name] for name in ("from", "to") if name in kwargs), None, None)[:2]
    if low is None:
        return tensor.random_(generator=generator)
    if len(args) + len(kwargs) == 1:
        return tensor.random_(low, generator=generator)
    if high is None:
        raise CaptureError(f"random_({low}, None) can't be captured{line_here()}; say where the numbers end")
    drawn = tensor.random_(high - low, generator=generator)
    return drawn.add_(low) if low else drawn
