"""Which compiler each stage of this rank uses: warms them up, times them for "auto", and makes replicas agree.

Called at deploy by stagekit.run.runtime, before the first step. A stage's replicas must compute alike to the last bit,
so the first of them decides for all; where one lacks a compiler none compiles.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from stagekit.errors import StagekitError, UserError
from stagekit.plan.contract import ModelSpec
from stagekit.run.groups import Groups
from stagekit.run.stage import StageRunner
from stagekit.run.warmup import Warmup

MARGIN = 0.97  # the compiled stage must be so much faster than the eager one, or it isn't worth the start-up
_ROUNDS = 5


@runtime_checkable
class Compilable(Protocol):
    """A stage's module that can be compiled in place; modules made by hand can't and stay as they are."""

    def use_backend(self, backend: str) -> None: ...

    def backend_problem(self, backend: str) -> str | None: ...


def compile_stages(
    runners: Mapping[int, StageRunner],
    spec: ModelSpec,
    compile: str,
    device: torch.device,
    groups: Groups | None,
    chosen: Mapping[int, str] | None = None,
) -> dict[int, str]:
    """Compile this rank's stages, run each once on zeros, and return the backend of each; leaves no trace.

    `compile`: "auto" or a backend. `chosen`: what an earlier attempt decided, repeated without timing. Waits for every
    rank, however long they compile. Raises UserError naming the stage that can't be compiled as asked.
    """
    stages = {i: runner for i, runner in runners.items() if isinstance(runner.module, Compilable)}
    wanted = {i: (chosen or {}).get(i, compile) for i in stages}
    problem = next((p for i, r in stages.items() if (p := _module(r).backend_problem(wanted[i]))), None)
    ranks_without = groups.count_replicas(problem is not None) if groups else int(problem is not None)
    if ranks_without:
        reason = problem or f"{ranks_without} other replica(s) of these stages can't"
        warnings.warn(
            f"stages {sorted(stages)} run eagerly instead of compiled with {compile!r}: {reason}", stacklevel=2
        )
        wanted = dict.fromkeys(wanted, "eager")
    ours = {i: _warmed(stages[i], spec, backend, device) for i, backend in wanted.items()}
    if groups is None:
        return ours
    groups.wait_for_everyone()
    for index, backend in ours.items():
        if wanted[index] == "auto" and groups.replicas is not None:
            ours[index] = "inductor" if groups.first_replica_says(int(backend == "inductor")) else "eager"
            _module(stages[index]).use_backend(ours[index])
            if ours[index] != backend:
                Warmup(stages[index], spec, device).run()
    groups.wait_for_everyone()
    return ours


def _module(runner: StageRunner) -> Compilable:
    module: Any = runner.module
    assert isinstance(module, Compilable)
    return module


def _warmed(runner: StageRunner, spec: ModelSpec, backend: str, device: torch.device) -> str:
    """Compile one stage; return the backend that it uses now."""
    module, warmup = _module(runner), Warmup(runner, spec, device)
    if backend != "auto":
        module.use_backend(backend)
        if backend != "eager":
            _run(warmup, runner, backend)
        return backend
    seconds = {}
    try:
        module.use_backend("inductor")
        _run(warmup, runner, "inductor")
        seconds["inductor"] = _fastest(warmup, device)
    except UserError as error:
        warnings.warn(f"{error}; it runs eagerly", stacklevel=2)
    module.use_backend("eager")
    warmup.run()
    seconds["eager"] = _fastest(warmup, device)
    best = "inductor" if seconds.get("inductor", float("inf")) < MARGIN * seconds["eager"] else "eager"
    module.use_backend(best)
    return best


def _run(warmup: Warmup, runner: StageRunner, backend: str) -> None:
    try:
        warmup.run()
    except StagekitError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"stage {runner.spec.index} ({runner.spec.begins_at or 'the first'}) can't be compiled with {backend!r}: "
            f"{type(error).__name__}: {first}; use compile: eager"
        ) from error


def _fastest(warmup: Warmup, device: torch.device) -> float:
    """Return the seconds of the fastest of several forwards and backwards."""
    synchronize = torch.get_device_module(device).synchronize
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    best = float("inf")
    for _ in range(_ROUNDS):
        synchronize()
        started = clock()
        warmup.run()
        synchronize()
        best = min(best, clock() - started)
    return best
