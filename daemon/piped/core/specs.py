"""What can be wrong with a job spec by itself: checked before anything is stored.

Called by the job service for Validate and Submit. The client's job file has the same rules (pipeapi.jobspec), which
this package can't import; a test holds the two together. Whether the program exists, or the model can be cut, is known only
where torch is; whether the cluster is large enough is a reason to wait, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from piped.core.model import JobSpec
from piped.core.schedules import AUTO, CHOSEN, SCHEDULES, blocks_misfit, csv_misfit, is_file, misfit
from piped.errors import FieldViolation, SpecError

DEVICES = ("auto", "cpu", "cuda")
PLACEMENTS = ("spread", "pack")
MAX_RANKS = 4096
MAX_PRIORITY = 1000
MAX_RESTARTS = 1000
MAX_SECONDS = 86_400
MAX_SPEC_BYTES = 256 << 10  # nodes tell it to workers in lines of 1 MiB, the environment twice
MAX_ENV_BYTES = 131_068  # of NAME=VALUE and its NUL; execve refuses a longer string (E2BIG)
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
PROGRAM = re.compile(r"hf:[^\0\n]+|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./]{0,61}[A-Za-z0-9])?")
SHA256 = re.compile(r"[0-9a-f]{64}")
_RESERVED_ENV = re.compile(
    r"(PIPED_|LD_|PYTHON|GRPC_|BASH_FUNC|MASTER_|TORCHELASTIC_).*|RANK|WORLD_SIZE|CUDA_VISIBLE_DEVICES"
)


def check(spec: JobSpec) -> None:
    """Raise SpecError with every violation of `spec`; return None for a good one."""
    violations = tuple(FieldViolation(name, text) for name, text in _violations(spec))
    if violations:
        raise SpecError(violations)


def _violations(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if not NAME.fullmatch(spec.name):
        yield (
            "name",
            f"{spec.name!r} is no job name: use 1 to 63 of a-z, 0-9, '-', '.', with a letter or digit at both ends",
        )
    if not PROGRAM.fullmatch(spec.program):
        yield (
            "program",
            f"{spec.program!r} is not of the form module:Class or hf:FOLDER, e.g. stagekit.examples.gpt:Program",
        )
    yield from _pipeline_violations(spec)
    if spec.steps < 1:
        yield "train.steps", f"is {spec.steps}; at least 1 step is needed"
    if spec.log_every < 1:
        yield "train.log_every", f"is {spec.log_every}; it must be at least 1"
    if spec.json_bytes > MAX_SPEC_BYTES:
        yield (
            "the job",
            f"takes {spec.json_bytes} bytes as JSON; the limit is {MAX_SPEC_BYTES}: put large values into a file in "
            "`source`, or on a path that every node sees",
        )
    if not 1 <= spec.start_timeout_s <= MAX_SECONDS:
        yield "recovery.start_timeout", f"is {spec.start_timeout_s} s; it must be 1 to {MAX_SECONDS}"
    if spec.hang_timeout_s > MAX_SECONDS:
        yield "recovery.hang_timeout", f"is {spec.hang_timeout_s} s; it must be 1 to {MAX_SECONDS}"
    if spec.restarts > MAX_RESTARTS:
        yield "recovery.restarts", f"is {spec.restarts}; it must be 0 to {MAX_RESTARTS}"
    if abs(spec.priority) > MAX_PRIORITY:
        yield "priority", f"is {spec.priority}; it must be {-MAX_PRIORITY} to {MAX_PRIORITY}"
    if spec.device not in DEVICES:
        yield "resources.device", f"{spec.device!r} is unknown; use one of {', '.join(DEVICES)}"
    if spec.placement not in PLACEMENTS:
        yield "resources.placement", f"{spec.placement!r} is unknown; use one of {', '.join(PLACEMENTS)}"
    if not NAME.fullmatch(spec.tenant):
        yield "tenant", f"{spec.tenant!r} is no name: use 1 to 63 of a-z, 0-9, '-', '.', a letter or digit at both ends"
    for name, value in spec.node_selector:
        if not LABEL.fullmatch(name) or not (value == "" or LABEL.fullmatch(value)):
            yield "resources.node_selector", f"{name}={value} is no label: use letters, digits, '.', '_', '-', '/'"
    if spec.source_sha256 and not SHA256.fullmatch(spec.source_sha256):
        yield "source", f"{spec.source_sha256!r} is no SHA-256 in lower-case hexadecimal"
    for name, value in spec.env:
        if not ENV_NAME.fullmatch(name):
            yield f"env.{name}", "is no name of an environment variable: use capitals, digits and '_', no digit first"
        elif _RESERVED_ENV.fullmatch(name):
            yield f"env.{name}", "is set by the node or would change how workers are loaded; choose another name"
        elif "\0" in value:
            yield f"env.{name}", "its value contains a NUL character, which no environment can carry"
        elif (size := len(name.encode()) + len(value.encode()) + 2) > MAX_ENV_BYTES:
            yield f"env.{name}", f"takes {size} bytes; the limit is {MAX_ENV_BYTES}: put the value into a file"


def _pipeline_violations(spec: JobSpec) -> Iterator[tuple[str, str]]:
    counts = {
        "stages": spec.stages,
        "stages_per_rank": spec.stages_per_rank,
        "replicas": spec.replicas,
        "chunks": spec.chunks,
    }
    if spec.chunks == CHOSEN:
        del counts["chunks"]
    for name, value in counts.items():
        if value < 1:
            yield f"pipeline.{name}", f"is {value}; it must be at least 1"
    if is_file(spec.schedule) != bool(spec.schedule_csv):
        yield (
            "pipeline.schedule",
            f"{spec.schedule!r}: a schedule file is named *.csv, and its text comes along with the job",
        )
        return
    if not spec.schedule_csv and spec.schedule not in (*SCHEDULES, AUTO):
        yield (
            "pipeline.schedule",
            f"{spec.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}, auto, or a .csv file",
        )
    if min(counts.values()) < 1:
        return
    if unfit := _own_table_misfit(spec):
        yield f"pipeline.{unfit[0]}", unfit[1]
    elif not (spec.schedule_csv or spec.stages_of_ranks) and spec.stages % spec.stages_per_rank:
        yield (
            "pipeline.stages_per_rank",
            f"{spec.stages} stages / {spec.stages_per_rank} stages per rank × {spec.replicas} replicas gives no whole "
            f"number of ranks ({spec.stages * spec.replicas / spec.stages_per_rank:.2f}); choose stages_per_rank so "
            f"that it divides {spec.stages}",
        )
    elif spec.world_size > MAX_RANKS:
        yield (
            "pipeline.stages",
            f"{spec.stages} stages / {spec.stages_per_rank} per rank × {spec.replicas} replicas are {spec.world_size} "
            f"ranks; the limit is {MAX_RANKS}",
        )
    elif not (spec.schedule_csv or spec.stages_of_ranks) and (
        unfit := misfit(spec.schedule, spec.stages, spec.stages_per_rank, spec.chunks)
    ):
        yield f"pipeline.{unfit[0]}", unfit[1]


def _own_table_misfit(spec: JobSpec) -> tuple[str, str] | None:
    """Return what is wrong with a table of stages that the job itself gives: a schedule file's, or blocks."""
    if spec.schedule_csv:
        per_rank = spec.stages_of_ranks
        if not per_rank and spec.stages_per_rank > 1:
            per_rank = (spec.stages_per_rank,) * spec.pp_ranks
        return csv_misfit(spec.schedule_csv, spec.stages, per_rank, spec.chunks)
    if spec.stages_of_ranks:
        return blocks_misfit(spec.schedule, spec.stages, spec.stages_of_ranks, spec.chunks)
    return None
