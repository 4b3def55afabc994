"""Lowering: compute orders → complete lists with transfers, receives hoisted, reductions at the end.

Each send follows the compute action that makes its data. Each receive is posted `window` compute actions before its
consumer (all: at the start of the list), in the sender's order per channel. What the executor waits for is the
consumer's business: a RECV only posts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stagekit.plan.actions import Action, Op
from stagekit.plan.contract import ModelSpec

Lists = tuple[tuple[Action, ...], ...]


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


def receive_window(schedule: str) -> int | None:
    """Return how many compute actions ahead a receive is posted; None means all at the start.

    Measured on gloo, 2 shared cores, alternating blocks, best and median step. Tiny stages, 1f1b, p=2, m=32: at its use
    28.6 / 127 ms, one ahead 37.0 / 109, two 28.3 / 70, four 23.1 / 76, all 20.4 / 70 (torch 46.1 / 126); a second run: two
    22.2 / 38.8, three 33.1 / 50.5, four 22.7 / 37.8, all 20.8 / 34.3 (torch 25.9 / 40.9). Stages that
    sleep 10 / 20 ms, p=4, m=8, ÷ ideal: one 1.054 / 1.067, two 1.042 / 1.057, four 1.058 / 1.079. So two: the next
    receive of each direction is always posted, and a channel holds two buffers, not one per chunk. GPipe is best with
    all posted at once (tiny: 25.7 / 29.5 ms against 44.7 / 73.0 one ahead), and holds every chunk anyway.
    """
    return None if schedule == "gpipe" else 2


def lower(orders: Lists, stage_ranks: Sequence[int], routes: Routes, *, window: int | None = 1) -> Lists:
    """Return the complete list of each rank."""
    return tuple(_lower_rank(rank, row, stage_ranks, routes, window) for rank, row in enumerate(orders))


def _lower_rank(
    rank: int, row: Sequence[Action], stage_ranks: Sequence[int], routes: Routes, window: int | None
) -> tuple[Action, ...]:
    posts: list[list[Action]] = [[] for _ in row]  # receives posted before compute action i
    for index, action in enumerate(row):
        at = 0 if window is None else max(0, index - window)
        posts[at] += _receives(action, stage_ranks, routes, rank)
    result = _input_transfers(rank, stage_ranks, routes)
    for index, action in enumerate(row):
        result += posts[index]
        result.append(action)
        result += _sends(action, stage_ranks, routes, rank)
    own = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
    result += [Action(Op.REDUCE, stage, 0) for stage in reversed(own) if stage in routes.reduced]
    result += [Action(Op.TIE_SUM, group[0], index) for index, group in enumerate(routes.ties) if set(group) & set(own)]
    return tuple(result)


def _receives(action: Action, stage_ranks: Sequence[int], routes: Routes, rank: int) -> list[Action]:
    stage, chunk = action.stage, action.chunk
    if action.op is Op.F:
        peers = sorted(source for source, target in routes.forward if target == stage)
        return [Action(Op.RECV_F, stage, chunk, peer) for peer in peers if stage_ranks[peer] != rank]
    peers = sorted(target for source, target in routes.backward if source == stage)
    return [Action(Op.RECV_B, stage, chunk, peer) for peer in peers if stage_ranks[peer] != rank]


def _sends(action: Action, stage_ranks: Sequence[int], routes: Routes, rank: int) -> list[Action]:
    stage, chunk = action.stage, action.chunk
    if action.op is Op.F:
        peers = sorted(target for source, target in routes.forward if source == stage)
        return [Action(Op.SEND_F, stage, chunk, peer) for peer in peers if stage_ranks[peer] != rank]
    peers = sorted(source for source, target in routes.backward if target == stage)
    return [Action(Op.SEND_B, stage, chunk, peer) for peer in peers if stage_ranks[peer] != rank]


def _input_transfers(rank: int, stage_ranks: Sequence[int], routes: Routes) -> list[Action]:
    pairs = sorted(pair for pair in routes.inputs if stage_ranks[pair[0]] != stage_ranks[pair[1]])
    sends = [Action(Op.SEND_X, source, 0, target) for source, target in pairs if stage_ranks[source] == rank]
    receives = [Action(Op.RECV_X, target, 0, source) for source, target in pairs if stage_ranks[target] == rank]
    return receives + sends
