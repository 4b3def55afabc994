"""Which slots a job gets: all of them at once, or none and the reason.

Called by `queue`, `earmark` and the job service. Rank = replica * pp_ranks + pp_rank; which stages a rank owns is its schedule's
business. The fewest nodes are taken, of equal ones those on fast wires; neighbours sit next to each other, and replicas take
separate nodes where the free slots allow it, unless the job asks to be packed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from piped.core.model import JobSpec, Node, NodeState, RankPlacement, Slot, SlotKey, Wire, wire_between
from piped.core.schedules import stages_of

_NONE: Mapping[Wire, float] = MappingProxyType({})
_MAX_COMPARED = 32  # nodes whose wires are compared for one place: a gang of many nodes is placed at once


@dataclass(frozen=True, slots=True)
class Offer:
    """The free slots of one node that a job may take."""

    node: Node
    slots: tuple[Slot, ...]


class Wires:
    """How fast the wires between nodes are, in powers of two: what differs by less is noise of their measurement.

    A wire that nobody has measured yet is as fast as most of the others; one that stays on a host beats all.
    """

    def __init__(self, measured: Mapping[Wire, float]) -> None:
        self._measured = measured
        self._usual: float | None = None

    def fastest(self, before: Node | None, equal: Sequence[Offer]) -> Offer:
        """Return the first offer, or an early one with a faster wire to the node `before`."""
        if before is None or not self._measured:
            return equal[0]
        return max(equal[:_MAX_COMPARED], key=lambda each: self._speed(before, each.node))  # the first of the fastest

    def _speed(self, one: Node, other: Node) -> float:
        if one.boot == other.boot:
            return math.inf
        rate = self._measured.get(wire_between(one.node_id, other.node_id))
        if rate is None and self._usual is None:
            self._usual = sorted(self._measured.values())[len(self._measured) // 2]
        return round(math.log2(max(1.0, rate or self._usual or 1.0)))


def place(
    spec: JobSpec, nodes: Iterable[Node], reservations: Mapping[SlotKey, int], measured: Mapping[Wire, float] = _NONE
) -> tuple[tuple[RankPlacement, ...] | None, str]:
    """Return the placement by rank, or None and what is missing, in the words that people read.

    `measured` are bytes per second between nodes.
    """
    live = sorted((each for each in nodes if _suits(spec, each)), key=lambda each: each.node_name)
    kind = _device_kind(spec, live)
    ready = [each for each in live if each.state is NodeState.READY and not each.closed_because]
    offers = [_offer(spec, kind, node, reservations) for node in ready]
    offers = [each for each in offers if each.slots]
    if sum(len(each.slots) for each in offers) < spec.world_size:
        return None, _shortage(spec, kind, ready, reservations) + _closed(live)
    wires = Wires(measured)
    apart = _seats_apart(spec, offers, wires) if spec.placement == "spread" else None
    seats = apart or _seats(spec.world_size, offers, wires)
    return tuple(_rank(spec, rank, node, slot) for rank, (node, slot) in enumerate(seats)), ""


def can_ever_fit(spec: JobSpec, nodes: Iterable[Node]) -> bool:
    """Return whether the cluster would hold the job if nothing else ran and every node were READY.

    Nodes that are gone, and those that an operator keeps from new work, do not count.
    """
    live = [each for each in nodes if _suits(spec, each)]
    kind = _device_kind(spec, live)
    return sum(_capacity(spec, kind, node) for node in live if not node.closed_because) >= spec.world_size


def usable(spec: JobSpec, nodes: Iterable[Node]) -> list[tuple[SlotKey, ...]]:
    """Return the slots, free or not, that the job could ever take, node by node."""
    live = sorted((each for each in nodes if _suits(spec, each)), key=lambda each: each.node_name)
    kind = _device_kind(spec, live)
    opened = [each for each in live if not each.closed_because]
    return [tuple((node.node_id, slot.index) for slot in node.slots if slot.kind == kind) for node in opened]


def shape_of(spec: JobSpec) -> tuple[object, ...]:
    """Return what decides whether there is room: jobs of one shape fit or don't fit together."""
    return spec.world_size, spec.device, spec.slots_per_node, spec.node_selector


def _suits(spec: JobSpec, node: Node) -> bool:
    """Return whether the node is there, or may come back within its lease, and has the labels that the job asks for."""
    return not node.is_gone and set(spec.node_selector) <= set(node.labels)


def _device_kind(spec: JobSpec, live: Iterable[Node]) -> str:
    """Return the one kind of device of the gang; a GPU node that is away for a moment still counts, a closed one doesn't."""
    if spec.device != "auto":
        return spec.device
    num_cuda = sum(slot.kind == "cuda" for node in live if not node.closed_because for slot in node.slots)
    return "cuda" if num_cuda >= spec.world_size else "cpu"


def _capacity(spec: JobSpec, kind: str, node: Node) -> int:
    count = sum(slot.kind == kind for slot in node.slots)
    return min(count, spec.slots_per_node) if spec.slots_per_node else count


def _offer(spec: JobSpec, kind: str, node: Node, reservations: Mapping[SlotKey, int]) -> Offer:
    free = [slot for slot in node.slots if slot.kind == kind and (node.node_id, slot.index) not in reservations]
    return Offer(node, tuple(free[: _capacity(spec, kind, node)]))


def _seats(count: int, offers: list[Offer], wires: Wires) -> list[tuple[Node, Slot]]:
    """Take `count` slots from the fewest nodes: the largest first, for the rest the tightest fit; of equal ones the
    one with the fastest wire to the node before.
    """
    seats: list[tuple[Node, Slot]] = []
    left = sorted(offers, key=lambda each: (-len(each.slots), each.node.node_name))
    while left and len(seats) < count:
        missing, before = count - len(seats), seats[-1][0] if seats else None
        enough = [each for each in left if len(each.slots) >= missing]
        size = min(len(each.slots) for each in enough) if enough else len(left[0].slots)
        equal = [each for each in enough or left if len(each.slots) == size]
        chosen = wires.fastest(before, equal)
        left.remove(chosen)
        seats += [(chosen.node, slot) for slot in chosen.slots[:missing]]
    return seats


def _seats_apart(spec: JobSpec, offers: list[Offer], wires: Wires) -> list[tuple[Node, Slot]] | None:
    """Return seats in which no two replicas share a node, or None."""
    left, seats = list(offers), []
    for _ in range(spec.replicas):
        taken = _seats(spec.pp_ranks, left, wires)
        if len(taken) < spec.pp_ranks:
            return None
        used = {node.node_id for node, _slot in taken}
        left = [each for each in left if each.node.node_id not in used]
        seats += taken
    return seats


def _rank(spec: JobSpec, rank: int, node: Node, slot: Slot) -> RankPlacement:
    replica, pp_rank = divmod(rank, spec.pp_ranks)
    ranks, per_rank, csv = spec.pp_ranks, spec.stages_of_ranks, spec.schedule_csv
    stages = stages_of(spec.schedule, spec.stages, ranks, pp_rank, per_rank, csv)
    return RankPlacement(rank, replica, stages, node.node_id, node.node_name, slot)


def _closed(live: list[Node]) -> str:
    """Name the nodes that would be there but take no new work."""
    names = [f"{each.node_name} ({each.closed_because})" for each in live if each.closed_because]
    return f"; no new work for {', '.join(names)}" if names else ""


def _shortage(spec: JobSpec, kind: str, ready: list[Node], reservations: Mapping[SlotKey, int]) -> str:
    """Say what is needed, what there is and what is in use: "needs 8 slots, the cluster has 4 (2 nodes × 2), …"."""
    sizes = Counter(count for node in ready if (count := sum(slot.kind == kind for slot in node.slots)))
    total = sum(size * count for size, count in sizes.items())
    used = sum(
        slot.kind == kind and (node.node_id, slot.index) in reservations for node in ready for slot in node.slots
    )
    kind_name = f"{kind} slot" if spec.device != "auto" else "slot"
    shape = " + ".join(
        f"{count} {'node' if count == 1 else 'nodes'} × {size}" for size, count in sorted(sizes.items(), reverse=True)
    )
    need = f"needs {spec.world_size} {kind_name}{'' if spec.world_size == 1 else 's'}"
    if spec.slots_per_node:
        need += f" with at most {spec.slots_per_node} per node"
    if spec.node_selector:
        need += f" on nodes with {', '.join(f'{name}={value}' for name, value in spec.node_selector)}"
        return f"{need}, which have {total} ({shape or 'no ready node'}), {used} in use"
    return f"{need}, the cluster has {total} ({shape or 'no ready node'}), {used} in use"
