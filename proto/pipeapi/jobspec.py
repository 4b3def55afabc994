"""The job file: its fields, defaults and limits.

Decides what a job file may say and where a mistake in it is (file:line:col). What only the coordinator knows (names in
use, slots) and what only a worker knows (does the program import, can it be cut) is checked there.
Called by pipectl (files) and by pipeapi.jobproto (messages that come without a file).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)

from pipeapi.mistakes import Problem, SpecError, StrictLoader, duplicate_keys, position
from pipeapi.schedules import (
    AUTO,
    CHOSEN,
    FORWARD,
    SCHEDULES,
    blocks_misfit,
    csv_forwards,
    csv_misfit,
    csv_trains,
    is_file,
    misfit,
)
from pipeapi.sections import (
    NAME,
    Checkpoint,
    Observe,
    Recovery,
    Resources,
    Size,
    SizeAboveZero,
    Strict,
    absolute,
)
from pipeapi.values import check_env, check_param, parse_size

MAX_FILE_BYTES = 1 << 20
MAX_SPEC_BYTES = 256 << 10  # a node tells each worker the whole job, and its environment again, in one line of 1 MiB
SPLITS = ("balanced", "balanced:measured", "balanced:flops", "balanced:bytes", "parameters", "layers", "bucket:25MiB")

_PROGRAM = r"^(hf:.+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"


def _chosen_or_count(value: object, handler: ValidatorFunctionWrapHandler) -> int:
    if isinstance(value, str) and value != AUTO:
        raise ValueError(f'is "{value}"; give a whole number of at least 1, or {AUTO}')
    return CHOSEN if value == AUTO else int(handler(value))


def _per_rank(value: object) -> object:
    """Say in one sentence what may be given: pydantic would have one for each kind of value."""
    counts = value if isinstance(value, list) else [value]
    if not counts or any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        told = f"is {value!r}; give a whole number of at least 1, or a list of one such number per rank"
        if value == AUTO:
            told += "; `pipectl plan` compares other numbers on as many ranks"
        raise ValueError(told)
    return value


Chunks = Annotated[
    int,
    Field(ge=1, le=65_536),
    WrapValidator(_chosen_or_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65_536}, {"const": AUTO}]}),
]


class Buckets(Strict):
    """How each stage is cut once more, into bucket submodules whose gradients are reduced together."""

    cap: Size = Field(25 << 20, description="bytes of gradients after which a bucket is full; 0: one bucket per stage")
    first: Size = Field(1 << 20, description="the same for the first bucket, i.e. the last layers")
    compress: Literal["bf16"] | None = Field(
        None, description="bf16: gradients are rounded to it before they are summed over replicas; half the bytes"
    )


class Balance(Strict):
    """What `split: balanced` weighs besides time."""

    memory: SizeAboveZero | None = Field(
        None,
        description="what the tensors of one worker may take: weights, gradients, optimizer state, and what autograd saves "
        "of the chunks in flight; null: no limit",
    )
    optimizer_state: float = Field(
        2.0,
        ge=0,
        lt=1024,
        description="values that the optimizer keeps per parameter, for `memory`: 2 for Adam, 0 for SGD",
    )
    speeds: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = Field(
        None, description="one number per rank of a pipeline; 2 takes half the time; null: all the same"
    )
    block_boundaries: bool = Field(False, description="cut only where a numbered module such as blocks.3 begins")


class Pipeline(Strict):
    """How the model is cut and in which order chunks run."""

    stages: int = Field(ge=1, le=4096, description="number of stages the model is cut into")
    stages_per_rank: Annotated[
        Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=1)]], BeforeValidator(_per_rank)
    ] = Field(
        1,
        description="stages that one worker runs; must divide `stages`; 2 for zb-v, v-half and dualpipe-v; or a list of one "
        "number per worker, each of which then runs the next so many stages",
    )
    replicas: int = Field(1, ge=1, le=4096, description="data-parallel copies of the whole pipeline")
    schedule: str = Field(
        "1f1b",
        description="one of: "
        + ", ".join(SCHEDULES)
        + "; auto: the fastest on measured costs that fits balance.memory (of "
        "those without a V); or a .csv file, looked for beside the job file",
    )
    chunks: Chunks = Field(
        8, description="parts that a batch is split into (microbatches); auto: chosen together with the cut"
    )
    split: str | list[str] = Field(
        "balanced",
        description="balanced[:measured|flops|bytes] | parameters | layers | bucket:SIZE, or the module paths where stages begin",
    )
    balance: Balance = Field(default_factory=lambda: Balance())
    buckets: Buckets = Field(default_factory=lambda: Buckets())
    compile: str = Field(
        "default",
        description="eager | inductor | another dynamo backend | default (eager on CPU, inductor on CUDA) | auto (times both)",
    )
    recompute: bool = Field(False, description="drop a chunk's activations and recompute them before its backward")

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        return value if is_file(value) else _one_of(value, (*SCHEDULES, AUTO))

    @field_validator("split")
    @classmethod
    def _known_split(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list):
            twice = next((path for path in value if value.count(path) > 1), None)
            if twice is not None:
                raise ValueError(f'"{twice}" is named twice; a module path is where one stage begins')
        elif value.startswith("bucket:"):
            size = parse_size(value.removeprefix("bucket:"))
            if not isinstance(size, int) or size < 1:
                raise ValueError(f'"{value}": a bucket holds at least 1 byte')
        else:
            return _one_of(value, SPLITS)
        return value

    @field_validator("balance")
    @classmethod
    def _balance_is_used(cls, value: Balance, info: ValidationInfo) -> Balance:
        split, stages, per_rank = (info.data.get(name) for name in ("split", "stages", "stages_per_rank"))
        if split is None or stages is None or per_rank is None:
            return value  # told already
        if value != Balance() and not (isinstance(split, str) and split.startswith("balanced")):
            raise ValueError(f"is for split: balanced, but split is {split!r}; leave one of them out")
        if isinstance(per_rank, int) and stages % per_rank:
            return value  # told by the rules of all fields
        ranks = len(per_rank) if isinstance(per_rank, list) else stages // per_rank
        is_known = isinstance(per_rank, list) or not is_file(info.data.get("schedule") or "")
        if value.speeds is not None and is_known and len(value.speeds) != ranks:
            raise ValueError(
                f"speeds has {len(value.speeds)} numbers, but {stages} stages with {per_rank} per rank run on "
                f"{ranks} ranks; give one number per rank of a pipeline"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Pipeline:
        per_rank, unfit = self.stages_per_rank, None
        if isinstance(per_rank, list):
            unfit = blocks_misfit(
                "gpipe" if is_file(self.schedule) else self.schedule, self.stages, per_rank, self.chunks
            )
        elif self.stages % per_rank:
            raise ValueError(f"stages_per_rank is {per_rank}, which does not divide stages: {self.stages}")
        elif not is_file(self.schedule):
            unfit = misfit(self.schedule, self.stages, per_rank, self.chunks)
        if unfit:
            raise ValueError(" ".join(unfit))
        if isinstance(self.split, list) and len(self.split) != self.stages - 1:
            raise ValueError(
                f"split names {len(self.split)} places where a stage begins, but {self.stages} stages need {self.stages - 1}"
            )
        return self


class Train(Strict):
    """What is trained, and for how long."""

    steps: int = Field(ge=1, description="optimizer steps; of a forward job, the most batches")
    accumulate: int = Field(
        1, ge=1, le=65_536, description="batches per optimizer step; the gradient is that of their mean loss"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="model and loss run under torch.autocast of that type, weights stay as they are; fp16 scales the loss",
    )
    clip_grad_norm: float | None = Field(None, gt=0, description="limit of the global gradient norm")
    seed: int = Field(1234, ge=0, lt=1 << 63, description="of the initial weights and of every random operation")
    log_every: int = Field(10, ge=1, description="steps between two log lines")
    eval_every: int | None = Field(None, ge=1, description="steps between two calls of the program's evaluate()")


class JobFile(Strict):
    """A job: a program, how it is cut, how long it trains."""

    version: Literal[1] = Field(description="of this format")
    name: str = Field(pattern=NAME, description="unique among live jobs: lower case, digits, '-' and '.'")
    program: str = Field(
        pattern=_PROGRAM,
        description='"module:Class", importable by the workers or found in `source`; or "hf:FOLDER", a transformers model '
        "directory: absolute on every node, or inside `source`",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the program")
    python: str | None = Field(None, description="interpreter of the workers on the nodes; only that one needs torch")
    source: str | None = Field(None, description="a folder to pack, upload and put first on the workers' path")
    init: Literal["auto", "stream", "per_op"] = Field(
        "auto",
        description="stream: weights as build_model() draws them after manual_seed(train.seed); per_op: each drawn by "
        "itself, so that a worker draws only its own; auto: stream up to 4 billion parameters",
    )
    weights: str | None = Field(
        None,
        description="absolute path of start weights on every node: a safetensors file, a folder of them, a checkpoint",
    )
    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="jobs of a higher one go first, and may take the slots of lower ones, which are stopped with their grace and "
        "queued again",
    )
    tenant: str = Field(
        "default", pattern=NAME, description="whose quota of slots it counts for, where there are quotas"
    )
    pipeline: Pipeline
    train: Train
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl where every slot is a CUDA device")
    resources: Resources = Field(default_factory=lambda: Resources())
    checkpoint: Checkpoint | None = None
    recovery: Recovery = Field(default_factory=lambda: Recovery())
    observe: Observe = Field(default_factory=lambda: Observe())
    env: dict[str, str | None] = Field(
        default_factory=dict, description="environment of the workers; null: taken from the submitter's, shown nowhere"
    )

    @field_validator("weights")
    @classmethod
    def _absolute_weights(cls, value: str | None) -> str | None:
        return value if value is None else absolute(value, "/data/llama")

    @model_validator(mode="after")
    def _folder_is_found(self) -> JobFile:
        folder = self.program.removeprefix("hf:")
        if "\0" in folder:
            raise ValueError("program holds a NUL character")
        if folder != self.program and not folder.startswith("/") and self.source is None:
            raise ValueError(
                f"program hf:{folder} is relative, so it is looked for in `source`, which is not given; add `source: .` to "
                "upload it, or write an absolute path that every node sees"
            )
        return self

    @field_validator("params")
    @classmethod
    def _params_fit_the_wire(cls, params: dict[str, Any]) -> dict[str, Any]:
        for name, value in params.items():
            check_param(name, value)
        return params

    @model_validator(mode="after")
    def _forward_trains_nothing(self) -> JobFile:
        name = _only_for_training(self)
        if self.pipeline.schedule == FORWARD and name is not None:
            raise ValueError(
                f"{name} is for training, but pipeline.schedule is forward, which trains nothing; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _traces_happen(self) -> JobFile:
        late = [step for step in self.observe.trace_steps if step >= self.train.steps]
        if late:
            raise ValueError(f"observe.trace_steps names step {late[0]}, but steps are 0 to {self.train.steps - 1}")
        return self

    @field_validator("env")
    @classmethod
    def _env_names(cls, env: dict[str, str | None]) -> dict[str, str | None]:
        for name, value in env.items():
            check_env(name, value or "")
        return env


def _only_for_training(job: JobFile) -> str | None:
    """Return the first field that the job sets and only training has."""
    fields = {
        "pipeline.recompute": job.pipeline.recompute,
        "pipeline.buckets.compress": job.pipeline.buckets.compress,
        "train.accumulate": job.train.accumulate > 1,
        "train.clip_grad_norm": job.train.clip_grad_norm,
        "train.eval_every": job.train.eval_every,
        "checkpoint": job.checkpoint,
    }
    return next((name for name, value in fields.items() if value), None)


def _one_of(value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, 1)
        raise ValueError(
            f'"{value}" is none of {", ".join(choices)}' + (f'; did you mean "{near[0]}"?' if near else "")
        )
    return value


# ---- reading


def load_file(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> JobFile:
    """Read a job file; `overrides` are "pipeline.stages=2" (values in YAML). Raises SpecError with every mistake."""
    name = os.fspath(path)
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise SpecError(name, [Problem("", f"can't read the job file: {error.strerror}")]) from None
    return load_text(raw, name, overrides)


def load_text(raw: bytes, name: str, overrides: Sequence[str] = ()) -> JobFile:
    """Like `load_file`, for bytes that are already read."""
    if len(raw) > MAX_FILE_BYTES:
        raise SpecError(name, [Problem("", f"{len(raw)} bytes; a job file holds at most {MAX_FILE_BYTES}")])
    try:
        loader = StrictLoader(raw.decode())
        root = loader.get_single_node()
        data = loader.construct_document(root) if root is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise SpecError(
            name, [Problem("", str(error.problem), mark.line + 1 if mark else 0, mark.column + 1 if mark else 0)]
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise SpecError(name, [Problem("", f"not a YAML document: {str(error).splitlines()[0]}")]) from None
    if not isinstance(data, dict):
        raise SpecError(
            name, [Problem("", "a job file is a mapping of fields", 1, 1, "start from `pipectl schema --example`")]
        )
    if duplicates := duplicate_keys(root):
        raise SpecError(name, duplicates)
    for override in overrides:
        _override(data, override)
    try:
        return JobFile.model_validate(data)
    except ValidationError as error:
        problems = [problem_of(item, root) for item in error.errors()]
        raise SpecError(name, sorted(problems, key=lambda p: (p.line, p.column))) from None


def locate(path: str | os.PathLike[str], field: str) -> str:
    """Return "path:line:col" of a field of a job file that was loaded before, of its nearest parent where it is absent."""
    root = StrictLoader(Path(path).read_text()).get_single_node()
    line, column = position(root, field.split("."), of_key=False)
    return f"{os.fspath(path)}:{line}:{column}"


def _override(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise SpecError("--set", [Problem(override, "write FIELD=VALUE, e.g. pipeline.stages=2")])
    at = data
    *parents, last = path.split(".")
    for key in parents:
        child = at.setdefault(key, {})
        if not isinstance(child, dict):
            raise SpecError("--set", [Problem(path, f"{key} holds a value, not fields")])
        at = child
    try:
        at[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError("--set", [Problem(path, f'"{text}" is no YAML value: {str(error).splitlines()[0]}')]) from None


def problem_of(error: Any, root: yaml.Node | None) -> Problem:
    location = [part for part in error["loc"] if not (isinstance(part, str) and part in ("str", "list[str]"))]
    about = error["msg"].removeprefix("Value error, ").split(" ", 1)[0].split(".")  # a rule of several fields names one
    place = [*location, *about] if about[0] in _field_names(location) else location
    line, column = position(root, place, of_key=error["type"] == "extra_forbidden")
    field = ".".join(map(str, location))
    kind, message, hint = error["type"], error["msg"].removeprefix("Value error, "), ""
    if kind == "extra_forbidden":
        message = "unknown field"
        names = _field_names(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), names, 1)
        parent = ".".join(map(str, location[:-1])) or "job"
        hint = (
            f'did you mean "{near[0]}"? ' if near else f"known: {', '.join(names)}; "
        ) + f"see pipectl explain {parent}"
    elif kind == "missing":
        message = "missing"
        hint = f"see pipectl explain {field}"
    elif kind == "string_pattern_mismatch" and field == "program":
        message = f'"{error["input"]}" is no program'
        hint = 'write "module:Class", e.g. stagekit.examples.gpt:Program, or hf:FOLDER'
    elif kind == "string_pattern_mismatch":
        message = f'"{error["input"]}" does not fit {error["ctx"]["pattern"]}'
    elif kind.endswith(("_type", "_parsing")):
        message = f"{message[0].lower()}{message[1:]}, not {error['input']!r}"
    elif kind in ("greater_than_equal", "less_than_equal", "greater_than", "less_than"):
        message = f"{error['input']!r}: {message[0].lower()}{message[1:]}"
    return Problem(field, message, line, column, hint)


def _field_names(location: Sequence[Any]) -> list[str]:
    model: type[BaseModel] | None = JobFile
    for part in location:
        model = next(iter(_models_of(model, str(part))), None) if model else None
    return list(model.model_fields) if model else []


def _models_of(model: type[BaseModel], field: str) -> list[type[BaseModel]]:
    info = model.model_fields.get(field)
    if info is None:
        return []
    candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
    return [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]


def explain(field: str) -> list[tuple[str, str, str, str]]:
    """Return (name, type, default, description) rows of a field such as "pipeline" or "pipeline.chunks".

    Raises KeyError for an unknown one. "" and "job" mean the top level.
    """
    model: type[BaseModel] = JobFile
    parts = [] if field in ("", "job") else field.split(".")
    for index, part in enumerate(parts):
        if part not in model.model_fields:
            raise KeyError(part)
        nested = _models_of(model, part)
        if not nested:
            if index < len(parts) - 1:
                raise KeyError(parts[index + 1])
            return [_row(model, part)]
        model = nested[0]
    return [_row(model, name) for name in model.model_fields]


def _row(model: type[BaseModel], name: str) -> tuple[str, str, str, str]:
    info = model.model_fields[name]
    nested = _models_of(model, name)
    default = (
        "required" if info.is_required() else ("…" if nested else str(info.get_default(call_default_factory=True)))
    )
    description = info.description or (nested[0].__doc__ if nested else "") or ""
    return name, _kind(info.annotation), default, description


_KINDS = {str: "text", bool: "true or false", int: "integer", float: "number"}


def _kind(annotation: Any) -> str:
    """Return a type as people write it in a job file."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:  # a union
        return " | ".join(_kind(each) for each in arguments if each is not type(None))
    return _KINDS.get(annotation, "section" if issubclass(annotation, BaseModel) else annotation.__name__)


def schedule_misfit(job: JobFile, text: str) -> tuple[str, str] | None:
    """Return the field that doesn't suit the text of the job's schedule file, and what would do; None where all fit."""
    pipeline = job.pipeline
    if not is_file(pipeline.schedule):
        return None
    per_rank = pipeline.stages_per_rank
    if isinstance(per_rank, int):
        per_rank = [] if per_rank == 1 else [per_rank] * (pipeline.stages // per_rank)
    unfit = csv_misfit(text, pipeline.stages, per_rank, pipeline.chunks)
    if unfit:
        return f"pipeline.{unfit[0]}", f"{unfit[1]} ({pipeline.schedule})"
    speeds, ranks = pipeline.balance.speeds, csv_forwards(text)[1]
    if speeds is not None and len(speeds) != ranks:
        told = f"has {len(speeds)} numbers, but {pipeline.schedule} has lines for {ranks}; give one number per rank"
        return "pipeline.balance.speeds", told
    name = None if csv_trains(text) else _only_for_training(job)
    told = f"is for training, but {pipeline.schedule} lists forwards alone, which train nothing; leave it out"
    return None if name is None else (name, told)
