"""A job between its three shapes: the file as validated, the message that travels, the plain dict that a worker reads.

What a job file may say is checked in pipeapi.jobspec. Used by pipectl, the coordinator and node daemons.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeapi.jobspec import MAX_SPEC_BYTES, Balance, JobFile, Pipeline, problem_of, schedule_misfit
from pipeapi.mistakes import Problem, SpecError
from pipeapi.schedules import AUTO
from pipeapi.v1 import spec_pb2

_BACKENDS = {
    "auto": spec_pb2.BACKEND_AUTO,
    "gloo": spec_pb2.BACKEND_GLOO,
    "nccl": spec_pb2.BACKEND_NCCL,
}


def to_proto(
    job: JobFile, *, environ: Mapping[str, str], source_sha256: str = "", schedule_csv: str = ""
) -> spec_pb2.JobSpec:
    """Return the message of a job file; `env` entries that are null are taken from `environ`.

    `schedule_csv`: the text of the file that `pipeline.schedule` names. Raises SpecError for an entry that `environ` lacks,
    a schedule file for other numbers, and a job that is too long.
    """
    if unfit := schedule_misfit(job, schedule_csv):
        raise SpecError(job.name, [Problem(*unfit)])
    missing = [name for name, value in job.env.items() if value is None and name not in environ]
    if missing:
        raise SpecError("env", [Problem(f"env.{name}", "null, but not set in this environment") for name in missing])
    env = {name: environ[name] if value is None else value for name, value in job.env.items()}
    message = spec_pb2.JobSpec(
        name=job.name,
        program=job.program,
        params={key: _value(value) for key, value in job.params.items()},
        pipeline=_pipeline(job.pipeline, schedule_csv),
        train=spec_pb2.TrainSpec(
            steps=job.train.steps,
            clip_grad_norm=job.train.clip_grad_norm,
            seed=job.train.seed,
            log_every=job.train.log_every,
            eval_every=job.train.eval_every or 0,
            accumulate=job.train.accumulate,
            precision=job.train.precision,
        ),
        backend=_BACKENDS[job.backend],
        resources=spec_pb2.ResourcesSpec(
            device=job.resources.device,
            slots_per_node=job.resources.slots_per_node or 0,
            placement=job.resources.placement,
            node_selector=job.resources.node_selector,
            memory_bytes=job.resources.memory or 0,
        ),
        checkpoint=spec_pb2.CheckpointSpec(dir=job.checkpoint.dir if job.checkpoint else ""),
        observe=spec_pb2.ObserveSpec(trace_steps=job.observe.trace_steps),
        env=env,
        redacted_env=[name for name, value in job.env.items() if value is None],
        python=job.python or "",
        source_sha256=source_sha256,
        grace_s=job.recovery.grace,
        start_timeout_s=job.recovery.start_timeout,
        hang_timeout_s=job.recovery.hang_timeout or 0,
        init=job.init,
        weights=job.weights or "",
        priority=job.priority,
        tenant=job.tenant,
        restarts=job.recovery.restarts,
    )
    if (size := json_bytes(message)) > MAX_SPEC_BYTES:
        hint = "put large values into a file in `source`, or on a path that every node sees"
        told = f"takes {size} bytes as JSON; the limit is {MAX_SPEC_BYTES}"
        raise SpecError(job.name, [Problem("the job", told, hint=hint)])
    return message


def _pipeline(pipeline: Pipeline, schedule_csv: str) -> spec_pb2.PipelineSpec:
    per_rank, split = pipeline.stages_per_rank, pipeline.split
    return spec_pb2.PipelineSpec(
        stages=pipeline.stages,
        stages_per_rank=1 if isinstance(per_rank, list) else per_rank,
        stages_of_ranks=per_rank if isinstance(per_rank, list) else (),
        replicas=pipeline.replicas,
        schedule=Path(pipeline.schedule).name,
        schedule_csv=schedule_csv,
        chunks=pipeline.chunks,
        split=split if isinstance(split, str) else "",
        split_at=split if isinstance(split, list) else (),
        bucket_cap_bytes=pipeline.buckets.cap,
        bucket_first_cap_bytes=pipeline.buckets.first,
        bucket_compress=pipeline.buckets.compress or "",
        compile=pipeline.compile,
        recompute=pipeline.recompute,
        balance=spec_pb2.BalanceSpec(
            memory_bytes=pipeline.balance.memory or 0,
            optimizer_state=pipeline.balance.optimizer_state,
            speeds=pipeline.balance.speeds or (),
            block_boundaries=pipeline.balance.block_boundaries,
        ),
    )


def json_bytes(spec: spec_pb2.JobSpec) -> int:
    """Return the length of the whole job as JSON in ASCII, the way that workers are told it."""
    return len(json.dumps({**to_dict(spec), "env": dict(spec.env)}, separators=(",", ":")))


def to_dict(spec: spec_pb2.JobSpec) -> dict[str, Any]:
    """Return the job file that `spec` says, as plain JSON values with every field set: what a worker reads."""
    pipeline, train = spec.pipeline, spec.train
    backend = next((name for name, value in _BACKENDS.items() if value == spec.backend), "auto")
    return {
        "version": 1,
        "name": spec.name,
        "program": spec.program,
        "params": {key: _plain(value) for key, value in spec.params.items()},
        "python": spec.python or None,
        "source": spec.source_sha256 or None,
        "init": spec.init or "auto",
        "weights": spec.weights or None,
        "priority": spec.priority,
        "tenant": spec.tenant or "default",
        "pipeline": {
            "stages": pipeline.stages,
            "stages_per_rank": list(pipeline.stages_of_ranks) or pipeline.stages_per_rank,
            "replicas": pipeline.replicas,
            "schedule": pipeline.schedule,
            "schedule_csv": pipeline.schedule_csv or None,
            "chunks": pipeline.chunks or AUTO,
            "split": list(pipeline.split_at) or pipeline.split,
            "balance": _balance(pipeline),
            "buckets": {
                "cap": pipeline.bucket_cap_bytes,
                "first": pipeline.bucket_first_cap_bytes,
                "compress": pipeline.bucket_compress or None,
            },
            "compile": pipeline.compile,
            "recompute": pipeline.recompute,
        },
        "train": {
            "steps": train.steps,
            "clip_grad_norm": train.clip_grad_norm if train.HasField("clip_grad_norm") else None,
            "seed": train.seed,
            "log_every": train.log_every,
            "eval_every": train.eval_every or None,
            "accumulate": train.accumulate or 1,  # jobs stored before there were these
            "precision": train.precision or "fp32",
        },
        "backend": backend,
        "resources": {
            "device": spec.resources.device,
            "slots_per_node": spec.resources.slots_per_node or None,
            "placement": spec.resources.placement or "spread",
            "node_selector": dict(spec.resources.node_selector),
            "memory": spec.resources.memory_bytes or None,
        },
        "checkpoint": {"dir": spec.checkpoint.dir} if spec.checkpoint.dir else None,
        "recovery": {
            "grace": spec.grace_s,
            "start_timeout": spec.start_timeout_s,
            "restarts": spec.restarts,
            "hang_timeout": spec.hang_timeout_s or None,
        },
        "observe": {"trace_steps": list(spec.observe.trace_steps)},
        "env": {name: (None if name in spec.redacted_env else value) for name, value in spec.env.items()},
    }


def _balance(pipeline: spec_pb2.PipelineSpec) -> dict[str, Any]:
    if not pipeline.HasField("balance"):  # a job that was stored before there was one
        return Balance().model_dump()
    balance = pipeline.balance
    return {
        "memory": balance.memory_bytes or None,
        "optimizer_state": balance.optimizer_state,
        "speeds": list(balance.speeds) or None,
        "block_boundaries": balance.block_boundaries,
    }


def from_proto(spec: spec_pb2.JobSpec) -> JobFile:
    """Validate a message as a job file. Raises SpecError naming each bad field."""
    data = to_dict(spec)
    data["env"] = dict(spec.env)
    data["pipeline"].pop("schedule_csv")  # no field of the file: it lies beside it
    try:
        return JobFile.model_validate(data)
    except ValidationError as error:
        raise SpecError("request", [problem_of(item, None) for item in error.errors()]) from None


def _value(value: object) -> spec_pb2.ParamValue:
    if value is None:
        return spec_pb2.ParamValue(null_value=True)
    if isinstance(value, bool):
        return spec_pb2.ParamValue(bool_value=value)
    if isinstance(value, int):
        return spec_pb2.ParamValue(int_value=value)
    if isinstance(value, float):
        return spec_pb2.ParamValue(double_value=value)
    if isinstance(value, str):
        return spec_pb2.ParamValue(string_value=value)
    if isinstance(value, list):
        return spec_pb2.ParamValue(list_value=spec_pb2.ParamList(values=[_value(item) for item in value]))
    if isinstance(value, dict):
        return spec_pb2.ParamValue(map_value=spec_pb2.ParamMap(values={str(k): _value(v) for k, v in value.items()}))
    raise SpecError("params", [Problem("params", f"{value!r} is no number, string, list or mapping")])


def _plain(value: spec_pb2.ParamValue) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    if kind == "map_value":
        return {key: _plain(item) for key, item in value.map_value.values.items()}
    return None if kind in (None, "null_value") else getattr(value, kind)
