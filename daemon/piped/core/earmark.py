"""Which slots are kept for the head of the queue, and which attempts make room for it.

Free slots first, then those of attempts that are being stopped, then of lower priorities, then of the oldest attempts. An
earmark stands as long as all its slots can be used, so that the job only ever gets closer. Called by `queue` alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from piped.core import placement
from piped.core.model import Attempt, AttemptState, Job, Node, SlotKey

_FREE, _STOPPING, _LOWER, _OTHER = range(4)
Cost = tuple[int, int, int]  # one of the above, priority, order among those


def choose(
    job: Job,
    nodes: Mapping[str, Node],
    reservations: Mapping[SlotKey, int],
    attempts: Mapping[int, Attempt],
    jobs: Mapping[str, Job],
) -> tuple[tuple[SlotKey, ...], tuple[int, ...]]:
    """Return the slots that `job` waits for, and the fences to preempt so that it can start as soon as they are empty.

    Nobody is preempted unless that is enough. The cluster must be large enough for the job.
    """

    def cost(key: SlotKey) -> Cost:
        fence = reservations.get(key)
        if fence is None:
            return _FREE, 0, 0
        if attempts[fence].state is AttemptState.STOPPING or attempts[fence].is_terminal:
            return _STOPPING, 0, fence
        priority = jobs[attempts[fence].job_id].spec.priority
        if priority < job.spec.priority:
            return _LOWER, priority, -fence
        return _OTHER, 0, fence

    groups = placement.usable(job.spec, nodes.values())
    costs = {key: cost(key) for group in groups for key in group}
    slots = job.earmark if job.earmark and costs.keys() >= set(job.earmark) else _cheapest(job, groups, costs)
    if any(costs[key][0] == _OTHER for key in slots):
        return slots, ()
    victims = _victims(slots, costs, reservations)
    for fence in victims:  # spare whom the slots of the others make superfluous
        spared = {
            key
            for key, each in costs.items()
            if each[0] == _OTHER or (each[0] == _LOWER and reservations[key] not in victims - {fence})
        }
        fewer = _cheapest(job, [tuple(key for key in group if key not in spared) for group in groups], costs)
        if len(fewer) == job.spec.world_size:
            slots, victims = fewer, _victims(fewer, costs, reservations)
    return slots, tuple(sorted(victims))


def _victims(
    slots: tuple[SlotKey, ...], costs: Mapping[SlotKey, Cost], reservations: Mapping[SlotKey, int]
) -> frozenset[int]:
    return frozenset(reservations[key] for key in slots if costs[key][0] == _LOWER)


def _cheapest(job: Job, groups: list[tuple[SlotKey, ...]], costs: Mapping[SlotKey, Cost]) -> tuple[SlotKey, ...]:
    """Return as many slots as the job has ranks, or all there are, at most so many per node as it allows."""
    limit = job.spec.slots_per_node or None
    offered = [key for group in groups for key in sorted(group, key=lambda key: (costs[key], key))[:limit]]
    return tuple(sorted(sorted(offered, key=lambda key: (costs[key], key))[: job.spec.world_size]))
