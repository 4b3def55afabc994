"""The plan: a cut model, its schedule as verified lists, and what the simulator predicts. Small JSON; pure.

Made once per attempt. A rank that captured something else finds out by `fingerprint` before it joins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagekit.errors import UserError
from stagekit.plan.actions import Op, to_csv
from stagekit.plan.contract import ModelSpec, StageSpec, TensorSpec
from stagekit.plan.lowering import Lists, Routes, lower, receive_window, routes_of
from stagekit.plan.schedules.registry import (
    PerRank,
    compute_order,
    is_file,
    is_forward_only,
    per_rank_of,
    ranks_for,
    stage_table,
)
from stagekit.plan.shapes import evaluate
from stagekit.plan.timeline import Timeline, gantt, simulate
from stagekit.plan.transports import Transport
from stagekit.plan.verify import Cell, verify

HOP_S = 70e-6  # a small gloo message between two processes of a host, measured 38-71 µs
BYTES_PER_S = 3e9  # a 1 MiB gloo message, measured 3-6 GB/s
_DTYPE_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before launch. Stages are at `stage_ranks` of a pipeline; replicas repeat it."""

    model: ModelSpec
    schedule: str
    num_chunks: int
    stages_per_rank: PerRank
    replicas: int
    compile: str
    recompute: bool
    stage_ranks: tuple[int, ...]
    actions: Lists
    extension: tuple[Cell, ...]
    timeline: Timeline
    bit_equal: str  # to the unsplit model: "yes" or "no (first reason)"

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return max(self.stage_ranks) + 1

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.num_ranks * self.replicas

    @property
    def trains(self) -> bool:
        """Whether the lists have backwards; without, the model runs in eval mode."""
        return any(action.op in (Op.B, Op.I) for row in self.actions for action in row)

    @property
    def halved(self) -> frozenset[int]:
        """Stages whose backward is listed in two halves, I and W."""
        return frozenset(action.stage for row in self.actions for action in row if action.op is Op.W)

    @property
    def fingerprint(self) -> str:
        """Equal on ranks that captured and scheduled the same thing."""
        schedule = Path(self.schedule).name if is_file(self.schedule) else self.schedule  # it may lie elsewhere here
        parts = [self.model.graph_hash, schedule, self.num_chunks, self.stages_per_rank, self.replicas]
        parts += [stage.first_node for stage in self.model.stages]
        parts += [to_csv(self.actions)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the plan as one JSON document; actions in their text form."""
        document = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("actions", "extension")
        }
        document["actions"] = [[str(action) for action in row] for row in self.actions]
        document["fingerprint"] = self.fingerprint
        return json.dumps(document)

    def __str__(self) -> str:
        timeline = self.timeline
        title = (
            f"{len(self.stage_ranks)} stages on {self.num_ranks} ranks × {self.replicas} replicas, {self.schedule}, "
            f"{self.num_chunks} chunks: {timeline.makespan * 1e3:.1f} ms a step, bubble {timeline.bubble:.1%}"
        )
        return gantt(timeline.spans, title=title)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def check_counts(stages: int, stages_per_rank: PerRank, replicas: int, world_size: int | None = None) -> int:
    """Return the ranks that these counts need. Raises UserError with all four numbers where `world_size` differs."""
    if isinstance(stages_per_rank, tuple):
        if min(*stages_per_rank, replicas) < 1 or sum(stages_per_rank) != stages:
            raise UserError(
                f"stages {stages}, stages_per_rank {list(stages_per_rank)}, replicas {replicas}: each is at least 1 and the "
                f"numbers per rank add up to stages; these add up to {sum(stages_per_rank)}"
            )
    elif min(stages, stages_per_rank, replicas) < 1 or stages % stages_per_rank:
        raise UserError(
            f"stages {stages}, stages_per_rank {stages_per_rank}, replicas {replicas}: each is at least 1 and "
            "stages_per_rank divides stages, or is a list of one number per rank"
        )
    needed = ranks_for(stages, stages_per_rank) * replicas
    if world_size is not None and world_size != needed:
        raise UserError(
            f"world size {world_size} does not fit stages {stages} / stages_per_rank {stages_per_rank} × replicas "
            f"{replicas} = {needed}; start {needed} processes or change one of the others"
        )
    return needed


def check_per_rank(schedule: str, stages: int, stages_per_rank: int | Sequence[int], replicas: int) -> PerRank:
    """Return the stages of each rank, as `schedule` has them where it is a file. Raises UserError, ScheduleError."""
    given = stages_per_rank if isinstance(stages_per_rank, int) else tuple(stages_per_rank)
    found = per_rank_of(schedule, stages, given)
    check_counts(stages, found, replicas)
    return found


def verified_lists(
    schedule: str, stage_ranks: Sequence[int], num_chunks: int, routes: Routes
) -> tuple[Lists, tuple[Cell, ...]]:
    """Return each rank's complete list, and an order of all actions in which nothing waits. Raises ScheduleError.

    They run on a queue per direction (NCCL), and so also where messages are told apart by tag (gloo).
    """
    orders = compute_order(schedule, stage_ranks, max(stage_ranks) + 1, num_chunks)
    lists = lower(orders, stage_ranks, routes, window=receive_window(schedule), transport=Transport.DIRECTED)
    return lists, verify(lists, stage_ranks, num_chunks, routes, transport=Transport.DIRECTED)


def make_plan(
    model: ModelSpec,
    *,
    schedule: str,
    num_chunks: int,
    stages_per_rank: PerRank = 1,
    replicas: int = 1,
    compile: str = "eager",
    recompute: bool = False,
) -> Plan:
    """Schedule a cut model, verify the lists and simulate them. Raises ScheduleError or UserError."""
    num_stages = len(model.stages)
    stages_per_rank = per_rank_of(schedule, num_stages, stages_per_rank)
    check_counts(num_stages, stages_per_rank, 1)
    stage_ranks = stage_table(schedule, num_stages, stages_per_rank)
    trains = not is_forward_only(schedule)
    routes = routes_of(model, replicas=replicas, train=trains)
    lists, extension = verified_lists(schedule, stage_ranks, num_chunks, routes)
    timeline = _predict(model, lists, extension, stage_ranks, routes, recompute)
    return Plan(
        model,
        schedule,
        num_chunks,
        stages_per_rank,
        replicas,
        compile,
        recompute,
        stage_ranks,
        lists,
        extension,
        timeline,
        _bit_equal(model, compile, replicas, trains=trains),
    )


def tensor_bytes(tensor: TensorSpec, symbols: dict[str, int]) -> int:
    """Return the bytes of `tensor` for these symbol values."""
    size = _DTYPE_BYTES.get(tensor.dtype, 1)
    for dim in tensor.shape:
        size *= evaluate(dim, symbols)
    return size


def stage_output_bytes(model: ModelSpec, stage: StageSpec) -> int:
    """Return the bytes that one example chunk of `stage` sends to later stages."""
    symbols = {symbol.name: symbol.example for symbol in model.symbols}
    return sum(tensor_bytes(e.tensor, symbols) * len(e.targets) for e in model.edges if e.source == stage.index)


def _predict(
    model: ModelSpec,
    lists: Lists,
    extension: Sequence[Cell],
    stage_ranks: Sequence[int],
    routes: Routes,
    recompute: bool,
) -> Timeline:
    largest = max((stage_output_bytes(model, stage) for stage in model.stages), default=0)
    last = len(model.stages) - 1
    return simulate(
        lists,
        extension,
        stage_ranks,
        routes,
        forward=[stage.forward_s for stage in model.stages],
        backward=[
            stage.backward_s + (stage.forward_s if recompute and stage.index != last else 0.0) for stage in model.stages
        ],
        hop=HOP_S + largest / BYTES_PER_S,
    )


def _bit_equal(model: ModelSpec, compile: str, replicas: int, *, trains: bool) -> str:
    """Say whether a step equals the unsplit model's bit for bit on CPU fp32, after the conditions measured to matter."""
    drawing = next((stage for stage in model.stages if stage.draws), None)
    if drawing is not None:
        return f"no (stage {drawing.index} draws random numbers, seeded per chunk)"
    if trains and replicas > 1:
        return f"no (gradients are summed over {replicas} replicas)"
    if compile != "eager":
        return f"no (compiled with {compile})"
    if not trains:
        return "yes"
    holders: dict[str, int] = {}
    for stage in model.stages:
        for parameter in stage.parameters:
            holders[parameter.name] = holders.get(parameter.name, 0) + 1
    tied = next((name for name, count in holders.items() if count > 1), None)
    if tied:
        return f"no ({tied} is tied across stages)"
    fan_out = next((edge for edge in model.edges if len(edge.targets) > 1 and edge.tensor.requires_grad), None)
    if fan_out:
        return f"no ({fan_out.value} goes to {len(fan_out.targets)} stages)"
    return "yes"
