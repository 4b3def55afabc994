"""What the rank that plans decided, in the few numbers from which every other rank makes the same plan. Pure.

Costs are measured, so two ranks would decide differently: one tells the others. Made by `decision_of`, published by the
worker and by `Pipeline.deploy`, carried out by stagekit.api.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagekit.plan.costs import Costs

if TYPE_CHECKING:
    from stagekit.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Decision:
    """`first_nodes` is the cut; `costs` are those that lists are made from and predictions with.

    `schedule` is a name; of a file its last part, since every rank has the file in a folder of its own.
    """

    schedule: str
    num_chunks: int
    stages_per_rank: int | tuple[int, ...]
    first_nodes: tuple[str, ...]
    costs: Costs
    window: int | None  # compute actions that receives are posted ahead; None: all at the start
    memory_limit: float | None = None  # zb-auto's

    def to_json(self) -> str:
        """Return it as text; numbers come back as they were."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """Return what `to_json` wrote."""
        fields = json.loads(text)
        prices = fields.pop("costs")
        early, late = tuple(prices["input_grad"]), tuple(prices["weight_grad"])
        whole = tuple(prices["backward"])
        costs = Costs(tuple(prices["forward"]), early, late, prices["hop"], prices["kept"], whole)
        counts = fields["stages_per_rank"]
        per_rank = tuple(counts) if isinstance(counts, list) else counts
        nodes = tuple(fields["first_nodes"])
        return cls(**{**fields, "stages_per_rank": per_rank, "first_nodes": nodes, "costs": costs})


def decision_of(plan: Plan) -> Decision:
    """Return what `plan` decided."""
    nodes = tuple(stage.first_node for stage in plan.model.stages)
    return Decision(
        plan.schedule_name, plan.num_chunks, plan.stages_per_rank, nodes, plan.costs, plan.window, plan.memory_limit
    )
