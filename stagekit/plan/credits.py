"""Send credits: which sends use one, and how early a receive has to be posted so that its sender is never short of them.

A send whose gradient returns is reaped by it. Any other holds one of SEND_CREDITS until its message has arrived, counted
per stage and rank that it goes to, as stagekit.run.transfers does. Called by lowering, dependencies and network.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

from stagekit.plan.actions import Action, Op
from stagekit.plan.routes import Routes

SEND_CREDITS = 8  # sends of one stage to one rank that may be unfinished; posting number i waits for number i − 8


def uses_credit(op: Op, stage: int, peer: int, routes: Routes, *, trains: bool) -> bool:
    """Say whether a SEND_F or SEND_B from `stage` to stage `peer` holds a credit; `trains`: the lists have backwards."""
    return op is Op.SEND_B or (op is Op.SEND_F and not (trains and (stage, peer) in routes.backward))


def latest_posts(
    sends: Sequence[tuple[int, int, Action, Action]], when: Mapping[tuple[int, int], int], stage_ranks: Sequence[int]
) -> dict[Action, int]:
    """Return, per receive, the position in its rank's compute list before which it must be posted, where there is one.

    `sends` are those that use credits, in the order of their ranks' lists: (rank, position of the maker, send, receive).
    `when` numbers all compute cells (rank, position) in an order in which nothing waits. Posted there, a message has
    arrived when the send that waits for its credit comes, so that this order still holds.
    """
    queues: dict[tuple[int, int], list[tuple[tuple[int, int], Action]]] = defaultdict(list)
    for rank, position, send, receive in sends:
        queues[send.stage, stage_ranks[receive.stage]].append(((rank, position), receive))
    cells: dict[int, list[int]] = defaultdict(list)  # rank → when each of its cells runs
    for (rank, _), number in sorted(when.items()):
        cells[rank].append(number)
    result: dict[Action, int] = {}
    for (_, target_rank), queue in queues.items():
        for (_, receive), (waiting, _) in zip(queue, queue[SEND_CREDITS:], strict=False):
            if waiting in when:
                result[receive] = bisect_left(cells[target_rank], when[waiting])
    return result
