"""Routes: which stages exchange what. Read off a cut model, or made by hand for a chain.

Decides nothing about order: stagekit.plan.lowering turns routes into transfers, stagekit.plan.verify holds lists
against them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stagekit.plan.contract import ModelSpec


@dataclass(frozen=True, slots=True)
class Routes:
    """Which stages exchange what: pairs (from, to) of stages.

    `forward` carries activations; `backward` is the subset whose gradients return (to → from). `inputs` says which
    stage's rank (from) sends graph inputs and targets to which stage (to). `ties` are groups of stages that hold
    the same weight; `reduced` the stages whose gradients are summed over replicas.
    """

    forward: frozenset[tuple[int, int]]
    backward: frozenset[tuple[int, int]]
    inputs: frozenset[tuple[int, int]] = frozenset()
    ties: tuple[tuple[int, ...], ...] = ()
    reduced: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def chain(cls, num_stages: int, *, train: bool = True) -> Routes:
        """Return the routes of stages that each feed the next one."""
        pairs = frozenset((stage, stage + 1) for stage in range(num_stages - 1))
        return cls(pairs, pairs if train else frozenset())


def routes_of(
    spec: ModelSpec, *, replicas: int = 1, inputs: Iterable[tuple[int, int]] = (), train: bool = True
) -> Routes:
    """Read the routes off a cut model."""
    forward = {(edge.source, target) for edge in spec.edges for target in edge.targets}
    backward = {(edge.source, target) for edge in spec.edges for target in edge.targets if edge.tensor.requires_grad}
    holders: dict[str, list[int]] = {}
    for stage in spec.stages:
        for parameter in stage.parameters:
            if parameter.requires_grad and parameter.is_reached:
                holders.setdefault(parameter.name, []).append(stage.index)
    ties = sorted({tuple(stages) for stages in holders.values() if len(stages) > 1})
    reduced = {stage.index for stage in spec.stages if stage.buckets} if replicas > 1 else set()
    return Routes(
        frozenset(forward),
        frozenset(backward) if train else frozenset(),
        frozenset(inputs),
        tuple(ties) if train else (),
        frozenset(reduced) if train else frozenset(),
    )


class Neighbours:
    """Routes by stage, ascending: who makes what a stage reads, who reads what it makes, and the same for gradients."""

    def __init__(self, routes: Routes, num_stages: int) -> None:
        self.makers: list[list[int]] = [[] for _ in range(num_stages)]
        self.readers: list[list[int]] = [[] for _ in range(num_stages)]
        self.gradient_makers: list[list[int]] = [[] for _ in range(num_stages)]  # stages that return gradients to it
        self.gradient_readers: list[list[int]] = [[] for _ in range(num_stages)]  # stages that it returns gradients to
        for source, target in sorted(routes.forward):
            self.makers[target].append(source)
            self.readers[source].append(target)
        for source, target in sorted(routes.backward):
            self.gradient_makers[source].append(target)
            self.gradient_readers[target].append(source)
