"""Where a stage's values come from: a module's current values, a constructor replayed from a seed, or files.

`open_model` turns what the user gave into a module to capture plus a `ValueSource`. A constructor runs under the
init recorder, so the full weights exist nowhere; where the recorder has to give up, the source builds the model for
real, one process of a node at a time, and keeps what is asked for. graph.capture calls this; graph.compile.module asks the
source for one stage's names.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError, UserError
from stagekit.graph.values.loose import give_values_to_the_rest
from stagekit.graph.values.recorder import Draws, InitRecorder, NeedsExactDraws, NeedsRealBuild
from stagekit.graph.values.replay import Address, replay

STREAM_LIMIT = 4_000_000_000  # parameters; drawing them all takes 6-9 ns each, in every worker
INITS = ("stream", "per_op")


class ValueSource(Protocol):
    """Gives parameters, buffers and constants by the name they have in the unsplit model."""

    note: str  # for people: how the values are made, and what that costs
    equals_build: bool  # bit for bit what torch.manual_seed(seed); build_model() gives

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return new tensors on the CPU, one per name; nothing else of the model is kept."""
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """What a model starts from. `init`: "stream", "per_op", or "" for stream up to STREAM_LIMIT parameters.

    `weights`: a file or folder with values by name. `lock_dir`: shared by the processes of this node that may have
    to build the whole model, which they do one at a time.
    """

    init: str = ""
    weights: Path | None = None
    lock_dir: Path | None = None


class ModuleValues:
    """Copies of a given module's values, as they are when asked."""

    note = "copies of the module that was given"
    equals_build = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of the current values."""
        known = dict(named_tensors(self._module))
        return {name: known[name].detach().clone().cpu() for name in names}


class RecordedValues:
    """Values replayed from the log of a constructor."""

    def __init__(self, recorder: InitRecorder, module: nn.Module) -> None:
        self._log, self._seed = recorder.log, recorder.seed
        self.equals_build = recorder.draws is not Draws.PER_OP
        self.note = (
            "constructor replayed from the seed; peak is the stage plus one tensor"
            if self.equals_build
            else "each random operation of the constructor seeded by itself (init: per_op); peak is the stage alone"
        )
        self._addresses: dict[str, Address] = {}
        for name, tensor in named_tensors(module):
            try:
                self._addresses[name] = recorder.address_of(tensor)
            except NeedsRealBuild as error:
                if tensor.device.type != "meta":
                    raise
                raise CaptureError(
                    f"{name} is on the meta device and nothing in build_model() gives it a value; "
                    "initialise it there, or build it on the CPU"
                ) from error

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the values of `names` only; the global generator is left as it was."""
        wanted = {name: self._addresses[name] for name in names}
        with torch.random.fork_rng(devices=[]):
            return replay(self._log, wanted, self._seed)


class RebuiltValues:
    """Values of a model that is built for real each time: correct for any constructor, at the price of its memory."""

    equals_build = True

    def __init__(self, build_model: Callable[[], nn.Module], seed: int, reason: str, start: Start) -> None:
        self._build_model, self._seed, self._start = build_model, seed, start
        self._reason, self.note = reason, ""

    def skeleton(self) -> nn.Module:
        """Return the model without its large values."""
        with one_at_a_time(self._start.lock_dir):
            module = build_for_real(self._build_model, self._seed)
            size = sum({id(t): t.numel() * t.element_size() for _, t in named_tensors(module)}.values())
            self.note = (
                f"the whole model ({size / 2**20:.0f} MiB) is built in every worker, one of a node at a time, because "
                f"{self._reason}"
            )
            if self._start.weights is None:
                self.note += "; with `weights:` each stage would read its own values only"
            return _without_values(module)

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of `names` out of a model that is then dropped."""
        with one_at_a_time(self._start.lock_dir):
            return ModuleValues(build_for_real(self._build_model, self._seed)).take(names)


def open_model(
    model: nn.Module | Callable[[], nn.Module], seed: int, start: Start | None = None
) -> tuple[nn.Module, ValueSource]:
    """Return a module to capture and the source of its values; a constructor's module holds no large weights.

    Raises CaptureError for a parameter without a value, UserError for weights that don't fit the model.
    """
    start = start or Start()
    if start.init and start.init not in INITS:
        raise UserError(f"init={start.init!r} is none of {', '.join(INITS)}")
    if isinstance(model, nn.Module):
        if start.init:
            raise UserError(
                "init says how a constructor draws; the model is a module, whose values are taken as they are"
            )
        return _with_weights(model, ModuleValues(model), start)
    module, source = _open_constructor(model, seed, start)
    return _with_weights(module, source, start)


def _with_weights(module: nn.Module, source: ValueSource, start: Start) -> tuple[nn.Module, ValueSource]:
    if start.weights is None:
        return module, source
    from stagekit.graph.values.weights import WeightValues

    return module, WeightValues(start.weights, module, source)


def _open_constructor(build_model: Callable[[], nn.Module], seed: int, start: Start) -> tuple[nn.Module, ValueSource]:
    """Record the constructor in the cheapest way that is right; build it for real where none is."""
    per_op = start.init == "per_op"
    reason = ""
    for draws in (Draws.PER_OP,) if per_op else (Draws.QUICK, Draws.EXACT):
        try:
            module, recorder = _record(build_model, seed, draws)
            source: ValueSource = RecordedValues(recorder, module)
            give_values_to_the_rest(recorder, dict(named_tensors(module)), module)
            if not start.init and draws is not Draws.PER_OP and _numel(module) > STREAM_LIMIT:
                module, source = _open_constructor(build_model, seed, Start("per_op", lock_dir=start.lock_dir))
                source.note += f"; chosen because the model has more than {STREAM_LIMIT // 10**9} billion parameters"
            return module, source
        except CaptureError:
            raise
        except NeedsExactDraws as error:
            reason = str(error)
        except Exception as error:  # a constructor may fail only under the recorder: then build it for real
            reason = f"{type(error).__name__}: {error}".splitlines()[0].removeprefix("NeedsRealBuild: ")
            if isinstance(error, NeedsRealBuild):
                break
    rebuilt = RebuiltValues(build_model, seed, reason, start)
    return rebuilt.skeleton(), rebuilt


def _record(build_model: Callable[[], nn.Module], seed: int, draws: Draws) -> tuple[nn.Module, InitRecorder]:
    recorder = InitRecorder(seed, draws)
    with seeded(seed):
        try:
            with recorder:
                module = _checked(build_model())
        except Exception as error:
            raise (recorder.stopped or error) from error
        recorder.check_generator()
    if recorder.stopped is not None:
        raise recorder.stopped
    _verify(recorder, module)
    return module, recorder


def _verify(recorder: InitRecorder, module: nn.Module) -> None:
    """Compare what the constructor left in small tensors with what replay gives: not everything passes the recorder."""
    real = {name: t for name, t in named_tensors(module) if t.device.type == "cpu" and recorder.is_true(t)}
    with torch.random.fork_rng(devices=[]):
        made = replay(recorder.log, {name: recorder.address_of(t) for name, t in real.items()}, recorder.seed)
    for name, tensor in real.items():
        same = made[name].detach().contiguous().flatten().view(torch.uint8)
        if not torch.equal(same, tensor.detach().contiguous().flatten().view(torch.uint8)):
            raise NeedsRealBuild(f"{name} was written by something else than torch operations")


def build_for_real(build_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return `torch.manual_seed(seed); build_model()`; the generators are left as they were.

    `random` and `numpy.random` start from the same seed, or every worker would draw other values.
    """
    with seeded(seed):
        torch.manual_seed(seed)
        return _checked(build_model())


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Fork every generator of the process: torch's, `random`'s and numpy's, the latter two seeded."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def one_at_a_time(lock_dir: Path | None) -> Iterator[None]:
    """Hold this node's lock for whole models; the kernel releases it when a process dies."""
    folder = lock_dir or Path(tempfile.gettempdir())
    path = folder / ("whole-model.lock" if lock_dir else f"stagekit-{os.getuid()}-whole-model.lock")
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy of `module` with meta tensors for its large values; the module itself where it can't be copied."""
    memo: dict[int, Any] = {}
    memories: dict[int, Any] = {}  # tensors on the same memory stay so
    for _, tensor in named_tensors(module):
        empty = _on_meta(tensor, memories)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(module, memo)
    except Exception:
        return module


def _on_meta(tensor: Tensor, memories: dict[int, Any]) -> Tensor:
    try:
        real = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    memory = memories.setdefault(real._cdata, torch.UntypedStorage(real.nbytes(), device="meta"))
    empty = torch.empty(0, dtype=tensor.dtype, device="meta")
    return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, buffer and plain tensor attribute with its dotted name, tied names included."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, value in vars(child).items():
            if isinstance(value, Tensor):
                yield (f"{prefix}.{name}" if prefix else name), value


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _checked(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise CaptureError(f"the model's constructor returned {type(module).__name__}; return a torch.nn.Module")
    return module
