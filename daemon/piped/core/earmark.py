"""Which slots are kept for the head of the queue, and which attempts make room for it.

Free slots first, then those of attempts that are being stopped, then of lower priorities, then those of nodes that are away
for a moment, then of the oldest attempts. An earmark stands as long as all its slots can be used, so that the job only ever
gets closer; it is left for one that waits for nobody's end and no node's return. Called by `queue` alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from piped.core import placement
from piped.core.model import Attempt, AttemptState, Job, Node, NodeState, SlotKey

_FREE, _STOPPING, _LOWER, _AWAY, _OTHER = range(5)  # from _AWAY on nothing that the queue does makes room
Cost = tuple[int, int, int]  # one of the above, priority, order among those


def choose(
    job: Job,
    nodes: Mapping[str, Node],
    reservations: Mapping[SlotKey, int],
    attempts: Mapping[int, Attempt],
    jobs: Mapping[str, Job],
) -> tuple[tuple[SlotKey, ...], tuple[int, ...]]:
    """Return the slots that `job` waits for, and the fences to preempt so that it can start as soon as they are empty.

    Nobody is preempted unless that is enough with the nodes that are READY, and of those who could be the lowest priorities
    and the newest. The cluster must be large enough for the job.
    """

    def cost(key: SlotKey) -> Cost:
        is_here = nodes[key[0]].state is NodeState.READY
        fence = reservations.get(key)
        if fence is None:
            return (_FREE if is_here else _AWAY), 0, 0
        if attempts[fence].is_terminal:  # a process that can't be killed, say: nobody knows when it will be gone
            return _OTHER, 0, fence
        if attempts[fence].state is AttemptState.STOPPING:
            return (_STOPPING if is_here else _AWAY), 0, fence
        priority = jobs[attempts[fence].job_id].spec.priority
        if is_here and priority < job.spec.priority:
            return _LOWER, priority, -fence
        return _OTHER, 0, fence

    groups = placement.usable(job.spec, nodes.values())
    costs = {key: cost(key) for group in groups for key in group}
    slots = _cheapest(job, groups, costs)
    stands = job.earmark and costs.keys() >= set(job.earmark)
    if stands and (_has_to_wait(slots, costs) or not _has_to_wait(job.earmark, costs)):
        slots = job.earmark
    if _has_to_wait(slots, costs):
        return slots, ()
    victims = _victims(slots, costs, reservations)
    by_worth = sorted(victims, key=lambda fence: (-jobs[attempts[fence].job_id].spec.priority, fence))
    for fence in by_worth:  # spare whom the slots of the others make superfluous
        spared = {
            key
            for key, each in costs.items()
            if each[0] >= _AWAY or (each[0] == _LOWER and reservations[key] not in victims - {fence})
        }
        fewer = _cheapest(job, [tuple(key for key in group if key not in spared) for group in groups], costs)
        if len(fewer) == job.spec.world_size:
            slots, victims = fewer, _victims(fewer, costs, reservations)
    return slots, tuple(sorted(victims))


def _has_to_wait(slots: tuple[SlotKey, ...], costs: Mapping[SlotKey, Cost]) -> bool:
    return any(costs[key][0] >= _AWAY for key in slots)


def _victims(
    slots: tuple[SlotKey, ...], costs: Mapping[SlotKey, Cost], reservations: Mapping[SlotKey, int]
) -> frozenset[int]:
    return frozenset(reservations[key] for key in slots if costs[key][0] == _LOWER)


def _cheapest(job: Job, groups: list[tuple[SlotKey, ...]], costs: Mapping[SlotKey, Cost]) -> tuple[SlotKey, ...]:
    """Return as many slots as the job has ranks, or all there are, at most so many per node as it allows."""
    limit = job.spec.slots_per_node or None
    offered = [key for group in groups for key in sorted(group, key=lambda key: (costs[key], key))[:limit]]
    return tuple(sorted(sorted(offered, key=lambda key: (costs[key], key))[: job.spec.world_size]))
