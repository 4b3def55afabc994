"""Where a stage's values come from: a module's current values, or a constructor replayed from a seed.

`open_model` turns what the user gave into a module to capture plus a `ValueSource`. A constructor runs under the
init recorder, so the full weights exist nowhere; where the recorder has to give up, the source builds the model for
real and keeps what is asked for. graph.capture calls this; graph.stages asks the source for one stage's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError
from stagekit.graph.recorder import Address, InitRecorder, NeedsRealBuild, replay


class ValueSource(Protocol):
    """Gives parameters, buffers and constants by the name they have in the unsplit model."""

    note: str  # for people: how the values are made, and what that costs

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return new tensors on the CPU, one per name; nothing else of the model is kept."""
        ...


class ModuleValues:
    """Copies of a given module's values, as they are when asked."""

    note = "copies of the module that was given"

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of the current values."""
        known = dict(named_tensors(self._module))
        return {name: known[name].detach().clone().cpu() for name in names}


class RecordedValues:
    """Values replayed from the log of a constructor: bit-equal to building it from the seed."""

    note = "constructor replayed from the seed; peak is the stage plus one tensor"

    def __init__(self, recorder: InitRecorder, module: nn.Module, seed: int) -> None:
        self._recorder, self._seed = recorder, seed
        self._addresses: dict[str, Address] = {}
        for name, tensor in named_tensors(module):
            try:
                self._addresses[name] = recorder.address_of(tensor)
            except NeedsRealBuild:
                raise CaptureError(
                    f"{name} is on the meta device and nothing in build_model() gives it a value; "
                    "initialise it there, or build it on the CPU"
                ) from None

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the values of `names` only; the global generator is left as it was."""
        wanted = {name: self._addresses[name] for name in names}
        with torch.random.fork_rng(devices=[]):
            recorder = self._recorder
            return replay(recorder.entries, recorder.sizes, recorder.outside, wanted, self._seed)


class RebuiltValues:
    """Values of a model that is built for real each time: correct for any constructor, at the price of its memory."""

    def __init__(self, build_model: Callable[[], nn.Module], seed: int, reason: str) -> None:
        self._build_model, self._seed = build_model, seed
        self.note = f"the whole model is built on every worker, because {reason}"

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of `names` out of a model that is then dropped."""
        return ModuleValues(build_for_real(self._build_model, self._seed)).take(names)


def build_for_real(build_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return `torch.manual_seed(seed); build_model()` and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _checked(build_model())


def open_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> tuple[nn.Module, ValueSource]:
    """Return a module to capture and the source of its values; a constructor's module holds no large weights."""
    if isinstance(model, nn.Module):
        return model, ModuleValues(model)
    recorder = InitRecorder()
    try:
        with torch.random.fork_rng(devices=[]):
            recorder.begin()
            with recorder:
                module = _checked(model())
        return module, RecordedValues(recorder, module, seed)
    except CaptureError:
        raise
    except Exception as error:  # a constructor may fail only under the recorder: then build it for real
        module = build_for_real(model, seed)
        return module, RebuiltValues(model, seed, f"{type(error).__name__}: {error}".splitlines()[0])


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, buffer and plain tensor attribute with its dotted name, tied names included."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, value in vars(child).items():
            if isinstance(value, Tensor):
                yield (f"{prefix}.{name}" if prefix else name), value


def _checked(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise CaptureError(f"the model's constructor returned {type(module).__name__}; return a torch.nn.Module")
    return module
