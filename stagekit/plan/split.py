"""How to cut, as a user says it: `Balanced` and its options, the text forms of a job file, how stages will be used. Pure.

graph.cut.choose carries it out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagekit.errors import SplitError
from stagekit.plan.memory import chunks_in_flight
from stagekit.plan.schedules.registry import PerRank, ranks_for, stage_table

COSTS = ("measured", "flops", "bytes")
_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "KB": 10**3,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


@dataclass(frozen=True, slots=True)
class Balanced:
    """Cut so that the slowest rank is as fast as possible.

    `costs`: "measured" (each operation timed on made-up values), "flops" (counted, at a nominal rate) or "bytes" (moved);
    a transfer counts in full with "measured" alone, and only decides between equal cuts with the others.
    `memory_bytes`: what the tensors of one rank may take: weights, gradients, optimizer state, and what autograd saves of
    the chunks in flight. `optimizer_state`: values that the optimizer keeps per parameter, 2 for Adam. `speeds`: one
    number per rank of a pipeline; 2 takes half the time. `block_boundaries`: cut only where a numbered module such as
    "blocks.3" begins.
    """

    costs: str = "measured"
    memory_bytes: int | None = None
    speeds: tuple[float, ...] | None = None
    block_boundaries: bool = False
    optimizer_state: float = 2.0

    def __post_init__(self) -> None:
        if self.costs not in COSTS:
            raise SplitError(f"costs is {self.costs!r}; there are {', '.join(COSTS)}")
        if self.memory_bytes is not None and not (isinstance(self.memory_bytes, int) and self.memory_bytes >= 1):
            raise SplitError(f"memory_bytes is {self.memory_bytes!r}; give the bytes that one rank has, or None")
        speeds = self.speeds
        if speeds is not None and not (isinstance(speeds, list | tuple) and all(map(_is_positive, speeds))):
            raise SplitError(f"speeds is {speeds!r}; give one number above 0 per rank of a pipeline: (1.0, 0.5)")
        if not isinstance(self.block_boundaries, bool):
            raise SplitError(f"block_boundaries is {self.block_boundaries!r}; give True or False")
        if not _is_positive(self.optimizer_state) and self.optimizer_state != 0:
            raise SplitError(f"optimizer_state is {self.optimizer_state!r}; give the values per parameter, 2 for Adam")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


@dataclass(frozen=True, slots=True)
class Usage:
    """How the stages will run, which says what they hold. By default every chunk is in flight everywhere."""

    schedule: str = "gpipe"
    chunks: int = 1
    stages_per_rank: PerRank = 1
    recompute: bool = False

    def ranks(self, stages: int) -> tuple[int, ...]:
        """Return the rank of each stage. Raises ScheduleError."""
        return stage_table(self.schedule, stages, self.stages_per_rank)

    @property
    def most_per_rank(self) -> int:
        """The most stages that a rank holds."""
        return max(self.stages_per_rank) if isinstance(self.stages_per_rank, tuple) else self.stages_per_rank

    def in_flight(self, stages: int) -> tuple[int, ...]:
        """Return how many chunks each stage holds at most. Raises ScheduleError."""
        return chunks_in_flight(self.schedule, stages, self.stages_per_rank, self.chunks)


def parse_split(text: str) -> Balanced | int | str:
    """Return what a split in words means: `Balanced`, bytes of "bucket:25MiB", "parameters" or "layers".

    Raises SplitError listing the known forms.
    """
    name, _, detail = text.partition(":")
    if name == "balanced" and (not detail or detail in COSTS):
        return Balanced(detail or "measured")
    if name == "bucket" and detail:
        return parse_bytes(detail)
    if text in ("parameters", "layers"):
        return text
    raise SplitError(
        f'split is {text!r}; use "balanced", "parameters", "layers" or a list of module paths; also "balanced:flops", '
        '"balanced:bytes" and "bucket:25MiB"'
    )


def check_split(split: str | Sequence[str] | Balanced, stages: int, stages_per_rank: PerRank) -> None:
    """Raise SplitError for what fits no model: an unknown form, paths or speeds for another number of stages."""
    wish = parse_split(split) if isinstance(split, str) else split
    if isinstance(wish, Balanced):
        if wish.speeds is not None and len(wish.speeds) != (ranks := ranks_for(stages, stages_per_rank)):
            raise SplitError(
                f"speeds names {len(wish.speeds)} ranks, but {stages} stages run on {ranks}; give one "
                "number per rank of a pipeline"
            )
    elif isinstance(wish, Sequence) and not isinstance(wish, str):
        if len(wish) != stages - 1:
            raise SplitError(
                f"{len(wish)} module paths make {len(wish) + 1} stages, but {stages} were asked for; a path names where "
                "a stage after the first begins"
            )
        twice = next((name for name in wish if wish.count(name) > 1), None)
        if twice is not None:
            raise SplitError(f"split: {twice!r} is named twice; a module path is where one stage begins")


def split_of(pipeline: Mapping[str, Any]) -> str | Sequence[str] | Balanced:
    """Return what `split` and `balance` of a job file's pipeline mean together. Raises SplitError."""
    split, balance = pipeline["split"], pipeline.get("balance")
    wish = parse_split(split) if isinstance(split, str) else None
    if not isinstance(wish, Balanced) or not balance:
        paths: str | Sequence[str] = split
        return paths
    speeds = balance["speeds"]
    return replace(
        wish,
        memory_bytes=balance["memory"],
        speeds=tuple(speeds) if speeds else None,
        block_boundaries=balance["block_boundaries"],
        optimizer_state=balance["optimizer_state"],
    )


def parse_bytes(text: str) -> int:
    """Return the bytes of "25MiB", "1.5 GB" or "4096". Raises SplitError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    size = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0.0
    if size < 1:
        raise SplitError(
            f"{text!r} is no size of at least one byte; write e.g. 25MiB ({', '.join(filter(None, _UNITS))})"
        )
    return int(size)
