"""Load a job's program: import it, build it, say clearly what is wrong with it. Nothing runs on a device here."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagekit.errors import ScheduleError, UserError
from stagekit.plan.schedules.registry import FORWARD, is_forward_only
from stagekit.program import Batch

TRAIN, SCORE = "train", "forward"
REQUIRED = {
    TRAIN: ("build_model", "example_inputs", "loss", "optimizer", "batches"),
    SCORE: ("build_model", "example_inputs", "batches", "collect"),
}  # by the program's mode

_PLACES = ("folder", "source_dir")  # of an hf: program, which `program` and `source` name


def load_program(path: str, params: Mapping[str, Any], source_dir: str | None = None) -> Any:
    """Return the program `module:Class` built with `params`, or the transformers model in `hf:FOLDER`.

    A relative FOLDER is inside `source_dir`.
    `source_dir` goes first on the import path. Raises UserError for a module or class that does not exist, for one that
    lacks a method, and for params that its constructor does not take; what the user's code raises comes through.
    """
    if source_dir and source_dir not in sys.path:
        sys.path.insert(0, source_dir)
    if path.startswith("hf:"):
        path, params = "stagekit.hf.program:Program", _hf_params(path.removeprefix("hf:"), params, source_dir)
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(
                f"there is no module {error.name!r}; install it for the workers' interpreter, or name its folder as "
                "`source` in the job file"
            ) from error
        raise
    program_class = getattr(module, class_name, None)
    if program_class is None:
        names = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module_name]
        raise UserError(f"{module_name} has no {class_name}; it defines {', '.join(names) or 'no class'}")
    _check_params(program_class, params)
    if "mode" in vars(program_class) or not hasattr(program_class, "collect"):
        _check_methods(program_class, class_name)  # before anything is built; else its constructor may set the mode
    program = program_class(**params)
    _check_methods(program, class_name)
    return program


def _check_methods(program: Any, class_name: str) -> None:
    """Raise UserError where a program, or its class, lacks what its mode needs, or has what only the other one calls."""
    mode = getattr(program, "mode", TRAIN)
    if mode not in REQUIRED:
        raise UserError(f'{class_name}.mode is {mode!r}; write "{TRAIN}" or "{SCORE}"')
    missing = [name for name in REQUIRED[mode] if not callable(getattr(program, name, None))]
    if missing:
        also = f', or write mode = "{SCORE}" in it' if mode == TRAIN and hasattr(program, "collect") else ""
        raise UserError(
            f'{class_name} lacks {", ".join(missing)} for mode "{mode}"; see stagekit.program.Program{also}'
        )
    if mode == SCORE and hasattr(program, "parallelize"):
        raise UserError(
            f'{class_name} has parallelize(), which only programs of mode "{TRAIN}" are asked for: replicas of a forward job '
            "end at different times, and sharded ones would wait for each other; remove it"
        )
    if mode == TRAIN and hasattr(program, "collect") and "mode" not in vars(program):
        raise UserError(
            f'{class_name} has collect(), which only programs of mode "{SCORE}" are asked for, but its mode is "{TRAIN}"; '
            f'write mode = "{SCORE}", or remove collect'
        )


def check_mode(program: Any, schedule: str) -> bool:
    """Return whether a job runs forward only. Raises ScheduleError where the program's mode and `schedule` contradict."""
    scores = getattr(program, "mode", TRAIN) == SCORE
    if scores != is_forward_only(schedule):
        name = type(program).__name__
        raise ScheduleError(
            f'{name} only runs forward (its mode is "{SCORE}"), but {schedule} has backwards; write schedule: {FORWARD}'
            if scores
            else f'{schedule} has no backward, but {name} trains (its mode is "{TRAIN}"); write another schedule, or '
            f'mode = "{SCORE}" in the program'
        )
    return scores


def schedule_file(pipeline: Mapping[str, Any], folder: Path) -> str:
    """Return the schedule that a job's `pipeline` names; one that is a file is written into `folder` first."""
    name, text = str(pipeline["schedule"]), pipeline.get("schedule_csv")
    if not text:
        return name
    file = folder / Path(name).name
    file.write_text(text)
    return str(file)


def check_batch(batch: Any, step: int) -> Batch:
    """Return what batches() yielded for `step`. Raises UserError for anything but a Batch."""
    if not isinstance(batch, Batch):
        kind = type(batch).__name__
        raise UserError(f"batches() yielded a {kind} in step {step}; yield stagekit.Batch(args, kwargs, target)")
    return batch


def check_evaluation(program: Any, every: int) -> None:
    """Raise UserError where a job asks for an evaluation every so many steps (0: never) that its program does not have."""
    if every and not callable(getattr(program, "evaluate", None)):
        raise UserError(
            f"train.eval_every is {every}, but {type(program).__name__} has no evaluate(run, step); write one, or leave "
            "train.eval_every out"
        )


def _check_params(program_class: Any, params: Mapping[str, Any]) -> None:
    """Raise UserError naming the first of `params` that the constructor does not take, or those that it needs."""
    signature = inspect.signature(program_class)
    known = signature.parameters.values()
    hidden = _PLACES if program_class.__module__ == "stagekit.hf.program" else ()
    names = [p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in hidden]
    takes = f"{program_class.__name__} takes {', '.join(names) or 'none'}"
    if not any(p.kind is p.VAR_KEYWORD for p in known):
        unknown = next((name for name in params if name not in signature.parameters), None)
        if unknown is not None:
            near = difflib.get_close_matches(unknown, names, 1)
            meant = f'; did you mean "{near[0]}"?' if near else ";"
            raise UserError(f"params.{unknown}: there is no such parameter{meant} {takes}")
    missing = [p.name for p in known if p.name in names and p.default is p.empty and p.name not in params]
    if missing:
        raise UserError(f"params lacks {', '.join(missing)}; {takes}")
    try:
        signature.bind(**params)
    except TypeError as error:
        raise UserError(f"params: {error}; {takes}") from error


def _hf_params(folder: str, params: Mapping[str, Any], source_dir: str | None) -> dict[str, Any]:
    for name in _PLACES:
        if name in params:
            raise UserError(f"params.{name}: the folder of an hf: program stands in `program`")
    place = Path(folder)
    if not place.is_absolute():
        if source_dir is None:
            raise UserError(f"program hf:{folder} is relative, but the job has no `source`; write an absolute path")
        place = Path(source_dir) / place
    return {**params, "folder": str(place), "source_dir": source_dir}
