"""When messages arrive in a simulated step: one end of each is posted, then the other, then it travels.

See Note [Arrival] in stagekit.plan.transports. Only stagekit.plan.timeline calls this, action by action in an order in
which nothing waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stagekit.plan.actions import SENDS, Op
from stagekit.plan.credits import SEND_CREDITS, uses_credit
from stagekit.plan.routes import Neighbours, Routes
from stagekit.plan.transports import Channel, Message, Transport, message_of, wire


class Network:
    """The messages of one step; times in the caller's unit."""

    def __init__(
        self, stage_ranks: Sequence[int], routes: Routes, transport: Transport, hop: float, *, trains: bool
    ) -> None:
        self._stage_ranks, self._transport, self._hop = stage_ranks, transport, hop
        self._routes, self._trains = routes, trains
        self._makers = _makers(stage_ranks, routes, with_inputs=transport is not Transport.IMPLICIT)
        self._made: dict[tuple[str, int, int], float] = {}  # (kind, stage, chunk) → end of what made it
        self._posted: dict[Message, float] = {}  # by the end that came first
        self._arrived: dict[Message, float] = {}
        self._queues: dict[object, float] = {}  # arrival of a queue's last message
        self._sent: dict[tuple[int, int], list[Message]] = defaultdict(list)  # (stage, rank) → sends that use credits

    def ready(self, op: Op, stage: int, chunk: int) -> float:
        """Return when the data of a compute action is there."""
        if op is Op.W:
            return 0.0
        latest = 0.0
        for kind, maker, is_remote in self._makers["F" if op is Op.F else "B"][stage]:
            if not is_remote:
                at = self._made[kind, maker, chunk]
            elif self._transport is Transport.IMPLICIT:
                at = self._made[kind, maker, chunk] + self._hop
            else:
                at = self._arrived[Message(kind, maker, stage, 0 if kind == "X" else chunk)]
            if at > latest:
                latest = at
        return latest

    def make(self, op: Op, stage: int, chunk: int, end: float) -> None:
        """Note that a compute action ended."""
        if op is not Op.W:
            self._made["F" if op is Op.F else "B", stage, chunk] = end

    def post(self, op: Op, stage: int, chunk: int, peer: int, now: float) -> float:
        """Post one end of a message at `now` or, out of credits, later; return when."""
        if self._transport is Transport.IMPLICIT:
            return now
        message = message_of(op, stage, chunk, peer)
        if self._transport is Transport.EAGER:
            if op in SENDS:
                self._arrived[message] = now + self._hop
            return now
        if uses_credit(op, stage, peer, self._routes, trains=self._trains):
            now = self._take_credit(message, stage, peer, now)
        other = self._posted.pop(message, None)
        if other is None:
            self._posted[message] = now
            return now
        ends = self._stage_ranks[message.source], self._stage_ranks[message.target]
        queue = wire(self._transport, Channel(*ends, message.kind))
        leaves = max(other, now, self._queues.get(queue, 0.0))
        self._arrived[message] = leaves + self._hop
        if queue:
            self._queues[queue] = leaves + self._hop
        return now

    def _take_credit(self, message: Message, stage: int, peer: int, now: float) -> float:
        sent = self._sent[stage, self._stage_ranks[peer]]
        sent.append(message)
        return max(now, self._arrived[sent[-1 - SEND_CREDITS]]) if len(sent) > SEND_CREDITS else now


def _makers(
    stage_ranks: Sequence[int], routes: Routes, *, with_inputs: bool
) -> dict[str, list[list[tuple[str, int, bool]]]]:
    """Return, per kind of compute and stage, what it reads: (kind, its maker, whether that is on another rank)."""
    near = Neighbours(routes, len(stage_ranks))
    result: dict[str, list[list[tuple[str, int, bool]]]] = {}
    for kind, of in (("F", near.makers), ("B", near.gradient_makers)):
        result[kind] = [
            [(kind, maker, stage_ranks[maker] != rank) for maker in makers]
            for rank, makers in zip(stage_ranks, of, strict=True)
        ]
    for source, target in sorted(routes.inputs) if with_inputs else ():
        if stage_ranks[source] != stage_ranks[target]:
            result["F"][target].append(("X", source, True))
    return result
