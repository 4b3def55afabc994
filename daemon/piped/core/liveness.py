"""Leases: which nodes have been silent for too long. Only this coordinator's monotonic clock counts.

`coordinator.sessions` notes every beat when it was received and asks at every tick. No lease ends for a while after a
start, so that the fleet can reconnect, nor after the coordinator's own loop was late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RESTART_GRACE_S = 30.0  # on top of one TTL


@dataclass(slots=True)
class Leases:
    """Last beats by node_id. Times are seconds of one monotonic clock."""

    ttl_s: float
    last_tick_s: float  # at first the moment of the start
    not_before_s: float  # no lease ends earlier
    received_s: dict[str, float] = field(default_factory=dict)

    def beat(self, node_id: str, now_s: float) -> None:
        """Note a beat of the node."""
        self.received_s[node_id] = now_s

    def expires_s(self, node_id: str) -> float:
        """Return when the node's lease ends if no further beat comes."""
        return max(self.received_s.get(node_id, 0.0) + self.ttl_s, self.not_before_s)

    def tick(self, live_nodes: list[str], now_s: float) -> list[str]:
        """Return those of `live_nodes` whose lease has ended by now."""
        if now_s - self.last_tick_s > self.ttl_s / 2:
            self.not_before_s = max(self.not_before_s, now_s + self.ttl_s)  # we were late: beats wait in our queues
        self.last_tick_s = now_s
        for node_id in live_nodes:
            self.received_s.setdefault(node_id, now_s)
        return [node_id for node_id in live_nodes if self.expires_s(node_id) <= now_s]
