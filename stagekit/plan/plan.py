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
from stagekit.plan.actions import COMPUTE, Action, Op, to_csv
from stagekit.plan.contract import ModelSpec
from stagekit.plan.costs import Costs
from stagekit.plan.lowering import Lists, Routes, Window, lower, routes_of, window_of
from stagekit.plan.prices import model_costs
from stagekit.plan.prices import stage_output_bytes as stage_output_bytes
from stagekit.plan.schedules.registry import (
    PerRank,
    compute_order,
    is_file,
    is_forward_only,
    per_rank_of,
    ranks_for,
    stage_table,
)
from stagekit.plan.timeline import Timeline, gantt, simulate_at
from stagekit.plan.transports import Transport
from stagekit.plan.verify import Cell, verify


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
    costs: Costs
    window: int | None  # compute actions that receives are posted ahead; None: all at the start
    memory_limit: float | None = None  # zb-auto's, in (stage, chunk) activations of a rank
    compress: str = ""  # the type in which gradients are summed over replicas: "bf16", or their own

    @property
    def schedule_name(self) -> str:
        """The schedule for people; a file's name, which may lie in another folder on another rank."""
        return Path(self.schedule).name if is_file(self.schedule) else self.schedule

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
        parts = [self.model.graph_hash, self.schedule_name, self.num_chunks, self.stages_per_rank, self.replicas]
        parts += [stage.first_node for stage in self.model.stages]
        parts += [to_csv(self.actions)]
        parts += [self.compress] if self.compress else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def lists_for(self, routes: Routes) -> Lists:
        """Return the lists of this plan's compute with transfers for other routes: those of a step's inputs."""
        orders = [[action for action in row if action.op in COMPUTE] for row in self.actions]
        return _lowered(orders, self.stage_ranks, self.num_chunks, routes, self.window)[0]

    def to_json(self) -> str:
        """Return the plan as one JSON document; actions in their text form."""
        document = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("actions", "extension")
        }
        document["schedule"] = self.schedule_name
        document["actions"] = [[str(action) for action in row] for row in self.actions]
        document["fingerprint"] = self.fingerprint
        return json.dumps(document)

    def __str__(self) -> str:
        timeline = self.timeline
        title = (
            f"{len(self.stage_ranks)} stages on {self.num_ranks} ranks × {self.replicas} replicas, {self.schedule_name}, "
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
    schedule: str,
    stage_ranks: Sequence[int],
    num_chunks: int,
    routes: Routes,
    *,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    window: Window | str = "measured",
) -> tuple[Lists, tuple[Cell, ...]]:
    """Return each rank's complete list, and an order of all actions in which nothing waits. Raises ScheduleError.

    They run on a queue per direction (NCCL), and so also where messages are told apart by tag (gloo). `costs` and
    `memory_limit` are for zb-auto.
    """
    num_ranks = max(stage_ranks) + 1
    orders = compute_order(schedule, stage_ranks, num_ranks, num_chunks, costs=costs, memory_limit=memory_limit)
    ahead = window_of(schedule, window)
    return _lowered(orders, stage_ranks, num_chunks, routes, ahead)


def _lowered(
    orders: Sequence[Sequence[Action]], stage_ranks: Sequence[int], num_chunks: int, routes: Routes, window: Window
) -> tuple[Lists, tuple[Cell, ...]]:
    lists = lower(orders, stage_ranks, routes, window=window, transport=Transport.DIRECTED)
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
    costs: Costs | None = None,
    memory_limit: float | None = None,
    window: int | str | None = "measured",
    compress: str = "",
) -> Plan:
    """Schedule a cut model, verify the lists and simulate them on gloo. Raises ScheduleError or UserError.

    `costs`: those of another rank's plan; by default as the stages were measured. `memory_limit`: zb-auto's.
    """
    num_stages = len(model.stages)
    stages_per_rank = per_rank_of(schedule, num_stages, stages_per_rank)
    check_counts(num_stages, stages_per_rank, 1)
    stage_ranks = stage_table(schedule, num_stages, stages_per_rank)
    trains = not is_forward_only(schedule)
    routes = routes_of(model, replicas=replicas, train=trains)
    costs = costs or model_costs(model, compile=compile, recompute=recompute)
    ahead = window_of(schedule, window)
    lists, extension = verified_lists(
        schedule, stage_ranks, num_chunks, routes, costs=costs, memory_limit=memory_limit, window=ahead
    )
    timeline = simulate_at(costs, lists, extension, stage_ranks, routes, transport=Transport.RENDEZVOUS)
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
        _bit_equal(model, lists, compile, replicas, compress, trains=trains),
        costs,
        ahead,
        memory_limit,
        compress,
    )


def _bit_equal(model: ModelSpec, lists: Lists, compile: str, replicas: int, compress: str, *, trains: bool) -> str:
    """Say whether a step equals the unsplit model's bit for bit on CPU fp32, after the conditions measured to matter."""
    if trains and replicas > 1 and compress:
        return f"no (gradients are rounded to {compress} and summed over {replicas} replicas)"
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
    late = _out_of_order(lists)
    return f"no ({late} adds to the gradients after a later chunk)" if late else "yes"


def _out_of_order(lists: Lists) -> Action | None:
    """Return the first action that adds a chunk's gradients to those of a later chunk; None: all add in chunk order."""
    for halves in ((Op.B, Op.I), (Op.B, Op.W)):  # a weight that waits is added in W, any other in I
        for row in lists:
            last: dict[int, int] = {}
            for action in row:
                if action.op in halves:
                    if action.chunk < last.get(action.stage, 0):
                        return action
                    last[action.stage] = action.chunk
    return None
