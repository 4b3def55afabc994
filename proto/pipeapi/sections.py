"""Sections of the job file that say nothing of the model: resources, checkpoint, recovery, observe. Part of pipeapi.jobspec."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator

from pipeapi.values import SIZE_PATTERN, check_label, parse_duration, parse_size

NAME = r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$"
_TIME_SCHEMA = {
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": 86_400}, {"type": "string", "pattern": "^[0-9]+ *[smh]$"}]
}
Seconds = Annotated[int, BeforeValidator(parse_duration), Field(ge=0, le=86_400), WithJsonSchema(_TIME_SCHEMA)]
Timeout = Annotated[int, BeforeValidator(parse_duration), Field(ge=1, le=86_400), WithJsonSchema(_TIME_SCHEMA)]
_SIZE_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": SIZE_PATTERN}]}
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, lt=1 << 50), WithJsonSchema(_SIZE_SCHEMA)]
SizeAboveZero = Annotated[int, BeforeValidator(parse_size), Field(ge=1, lt=1 << 50), WithJsonSchema(_SIZE_SCHEMA)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Resources(Strict):
    """What a worker takes on a node."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where the slots are CUDA devices")
    slots_per_node: int | None = Field(None, ge=1, description="at most so many workers on one node")
    memory: SizeAboveZero | None = Field(
        None,
        description="what one worker and its children may take, where the node has a cgroup to hold them; null: no limit",
    )
    placement: Literal["spread", "pack"] = Field(
        "spread",
        description="spread: replicas on different nodes where free slots allow it; pack: the whole job on the fewest nodes",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="labels that its nodes must have: what `piped node --label KEY=VALUE` says"
    )

    @field_validator("node_selector")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        for name, wanted in value.items():
            check_label(name, wanted)
        return value


class Checkpoint(Strict):
    """Where the trained weights go."""

    dir: str = Field(description="absolute path of a folder that every node of the job sees")

    @field_validator("dir")
    @classmethod
    def _absolute_dir(cls, value: str) -> str:
        return absolute(value, "/data/gpt")


class Recovery(Strict):
    """How a job ends and what it survives."""

    grace: Seconds = Field(
        30, description="between SIGTERM and SIGKILL when the job is cancelled, preempted or drained from a node"
    )
    restarts: int = Field(
        0,
        ge=0,
        le=1000,
        description="attempts after failures that are the job's own, each from step 0; lost nodes and networks count for nothing",
    )
    start_timeout: Timeout = Field(
        600, description="for the nodes to prepare, and again for every rank to import, cut, compile and join"
    )
    hang_timeout: Timeout | None = Field(
        None,
        description="without any progress of a rank, after which the attempt has hung; null: five of its longest steps, at least "
        "10 s; more in data, eval, hooks, save and the first step",
    )


class Observe(Strict):
    """What is recorded beyond metrics."""

    trace_steps: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, description="steps of which every action is recorded"
    )


def absolute(value: str, example: str) -> str:
    if not value.startswith("/") or "\0" in value:
        raise ValueError(f'"{value}" is no absolute path; workers run in folders of their own, so write e.g. {example}')
    return value
