"""Leases: which nodes have been silent for too long. Only this coordinator's monotonic clock counts.

`coordinator.sessions` notes every beat when it was received and asks at every tick. No lease ends for a while after a
start, so that the fleet can reconnect, nor after the coordinator's own loop was late. A large fleet beats less often, so
that all its beats together are no more than a thousand nodes'.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RESTART_GRACE_S = 30.0  # on top of one TTL
NODES_PER_STRETCH = 1000


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often a node beats, and how long it may be silent."""

    beat_s: float
    ttl_s: float

    def for_fleet(self, num_nodes: int) -> Cadence:
        """Return the cadence of a fleet of that size; `self` is a small one's."""
        stretch = max(1, -(-num_nodes // NODES_PER_STRETCH))
        return Cadence(self.beat_s * stretch, self.ttl_s * stretch)


@dataclass(slots=True)
class Leases:
    """Last beats by node_id. Times are seconds of one monotonic clock."""

    cadence: Cadence  # of the fleet as large as it is now
    last_tick_s: float  # at first the moment of the start
    not_before_s: float  # no lease ends earlier
    received_s: dict[str, float] = field(default_factory=dict)
    granted_s: dict[str, float] = field(default_factory=dict)  # how long the last beat is good for
    told: dict[str, Cadence] = field(default_factory=dict)

    def beat(self, node_id: str, now_s: float) -> Cadence | None:
        """Note a beat of the node. Return the cadence that it has to be told; None: it knows."""
        known, cadence = self.told.get(node_id), self.cadence
        self.received_s[node_id] = now_s
        self.granted_s[node_id] = max(
            cadence.ttl_s, known.ttl_s if known else 0.0
        )  # its next beat may be as late as before
        self.told[node_id] = cadence
        return None if known == cadence else cadence

    def hear(self, node_id: str, now_s: float) -> None:
        """Note another message of the node, which it is alive to send."""
        self.received_s[node_id] = now_s

    def pause(self, now_s: float) -> None:
        """Have no lease end for a TTL: nothing can be stored, so that nodes can't register again either."""
        self.not_before_s = max(self.not_before_s, now_s + self.cadence.ttl_s)

    def expires_s(self, node_id: str) -> float:
        """Return when the node's lease ends if no further beat comes."""
        granted_s = self.granted_s.get(node_id, self.cadence.ttl_s)
        return max(self.received_s.get(node_id, 0.0) + granted_s, self.not_before_s)

    def tick(self, live_nodes: list[str], now_s: float) -> list[str]:
        """Return those of `live_nodes` whose lease has ended by now."""
        if now_s - self.last_tick_s > self.cadence.ttl_s / 2:
            self.not_before_s = max(
                self.not_before_s, now_s + self.cadence.ttl_s
            )  # we were late: beats wait in our queues
        self.last_tick_s = now_s
        for node_id in live_nodes:
            self.received_s.setdefault(node_id, now_s)
        return [node_id for node_id in live_nodes if self.expires_s(node_id) <= now_s]
