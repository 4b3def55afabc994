"""Lowering: compute orders → complete lists with transfers, receives hoisted, reductions at the end.

Each send follows the compute action that makes its data (F sends activations, I or B gradients, W nothing). Each
receive is posted `window` compute actions before its consumer (all: at the start of the list), earlier where its sender
would run out of credits, and never before one that its sender sends earlier on the same channel. What the executor
waits for is the consumer's business: a RECV only posts. stagekit.plan.verify proves what comes out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from stagekit.errors import ScheduleError
from stagekit.plan.actions import COMPUTE, Action, Op
from stagekit.plan.credits import SEND_CREDITS, latest_posts, uses_credit
from stagekit.plan.dependencies import compute_order_of
from stagekit.plan.routes import Neighbours
from stagekit.plan.routes import Routes as Routes
from stagekit.plan.routes import routes_of as routes_of
from stagekit.plan.transports import Channel, Transport, wire

Lists = tuple[tuple[Action, ...], ...]
Window = int | None | Mapping[Channel, int | None]
W = TypeVar("W", bound=Window)
Made = Sequence[Sequence[Sequence[tuple[Action, Action]]]]  # by rank and compute position: (send, its receive)


def receive_window(schedule: str) -> int | None:
    """Return how many compute actions ahead a receive is posted; None means all at the start.

    Measured on gloo, 2 shared cores, alternating blocks, best and median step. Tiny stages, 1f1b, p=2, m=32: at its use
    28.6 / 127 ms, one ahead 37.0 / 109, two 28.3 / 70, four 23.1 / 76, all 20.4 / 70 (torch 46.1 / 126); a second run: two
    22.2 / 38.8, three 33.1 / 50.5, four 22.7 / 37.8, all 20.8 / 34.3 (torch 25.9 / 40.9). Stages that
    sleep 10 / 20 ms, p=4, m=8, ÷ ideal: one 1.054 / 1.067, two 1.042 / 1.057, four 1.058 / 1.079. So two: the next
    receive of each direction is always posted, and a channel holds two buffers, not one per chunk. GPipe is best with
    all posted at once (tiny: 25.7 / 29.5 ms against 44.7 / 73.0 one ahead), and holds every chunk anyway; so does BFS.

    One number for all channels: simulated with a time of its own for each pair's messages, up to 2 F, on 4 ranks with 8
    chunks (1f1b, eager 1f1b, zb-h1, interleaved, zb-v, v-half, dualpipe-v; rendezvous and directed), no channel with 0, 1, 3, 4
    or all ahead made a step faster than two everywhere: 0.00 %. One ahead gives already what posting early can; at its
    use costs 7 % (1f1b) to 16 % (interleaved), and some single channels cost that alone. `lower` takes a mapping.
    """
    return None if schedule in ("gpipe", "bfs") else 2


def window_of(schedule: str, window: W | str) -> W | int | None:
    """Return `window`, or where it is told in words ("measured") that of the schedule."""
    return receive_window(schedule) if isinstance(window, str) else window


def lower(
    orders: Sequence[Sequence[Action]],
    stage_ranks: Sequence[int],
    routes: Routes,
    *,
    window: Window = 1,
    transport: Transport = Transport.RENDEZVOUS,
) -> Lists:
    """Return the complete list of each rank, in an order that never deadlocks on `transport`.

    `window`: one for all, or one per channel (one ahead where a channel is not named). On an ordered transport the
    receives take the place that the senders' order gives them, so that both ends of a pair agree, and `window` is not
    used. Raises ScheduleError for what is no compute order.
    """
    for rank, row in enumerate(orders):
        for action in row:
            if action.op not in COMPUTE or not 0 <= action.stage < len(stage_ranks):
                raise ScheduleError(
                    f"rank {rank}: {action} is no compute action of stages 0 to {len(stage_ranks) - 1}; "
                    "lowering adds the transfers itself"
                )
    near = Neighbours(routes, len(stage_ranks))
    made = [[_transfers(action, stage_ranks, near) for action in row] for row in orders]
    if transport is Transport.ORDERED:
        rows = _in_pair_order(orders, made, stage_ranks, routes)
    else:
        latest = {} if window is None else _latest_posts(orders, made, stage_ranks, routes)
        rows = _hoisted(orders, made, _by_wire(orders, made, stage_ranks, transport), window, latest)
    return tuple(
        (*_input_transfers(rank, stage_ranks, routes, transport), *row, *_reductions(rank, stage_ranks, routes))
        for rank, row in enumerate(rows)
    )


def _hoisted(
    orders: Sequence[Sequence[Action]],
    made: Made,
    wires: Mapping[object, Sequence[tuple[Channel, int, Action]]],
    window: Window,
    latest: Mapping[Action, int],
) -> list[list[Action]]:
    """Return the lists with each receive `window` compute actions before its consumer, in its sender's order.

    Earlier than that where `latest` says so, or where its queue has one behind it that is posted earlier.
    """
    posts: list[list[tuple[int, int, Action]]] = [[] for _ in orders]  # (post before, consumer), both compute positions
    for receives in wires.values():
        target_rank = receives[0][0].target_rank
        at = first_use = len(orders[target_rank])
        from_the_last = []
        for channel, consumer, receive in reversed(receives):
            first_use = min(first_use, consumer)  # a later receive of this wire may be needed before this one,
            ahead = window.get(channel, 1) if isinstance(window, Mapping) else window
            at = min(at, 0 if ahead is None else max(0, first_use - ahead))  # or be posted long before its use
            at = min(at, latest.get(receive, at))
            from_the_last.append((at, first_use, receive))
        posts[target_rank] += reversed(from_the_last)
    rows = []
    for rank, row in enumerate(orders):
        waiting = sorted(posts[rank], key=lambda post: post[:2])  # stable: a wire's order holds
        result: list[Action] = []
        k = 0
        for index, action in enumerate(row):
            while k < len(waiting) and waiting[k][0] <= index:
                result.append(waiting[k][2])
                k += 1
            result.append(action)
            result += [send for send, _ in made[rank][index]]
        rows.append(result)
    return rows


def _latest_posts(
    orders: Sequence[Sequence[Action]], made: Made, stage_ranks: Sequence[int], routes: Routes
) -> dict[Action, int]:
    """Return where receives must be posted for the sake of their senders' credits; nothing where all have enough."""
    trains = any(action.op in (Op.B, Op.I) for row in orders for action in row)
    sends = [
        (rank, position, send, receive)
        for rank, row in enumerate(made)
        for position, pairs in enumerate(row)
        for send, receive in pairs
        if uses_credit(send.op, send.stage, receive.stage, routes, trains=trains)
    ]
    most = Counter((send.stage, stage_ranks[receive.stage]) for _, _, send, receive in sends).most_common(1)
    if not most or most[0][1] <= SEND_CREDITS:
        return {}
    when = {cell: number for number, cell in enumerate(compute_order_of(orders, stage_ranks, routes))}
    return latest_posts(sends, when, stage_ranks)


def _by_wire(
    orders: Sequence[Sequence[Action]], made: Made, stage_ranks: Sequence[int], transport: Transport
) -> dict[object, list[tuple[Channel, int, Action]]]:
    """Return the receives of each wire in their sender's order, with the position of the action that needs them."""
    consumers = {
        (action.op is Op.F, action.stage, action.chunk): index
        for row in orders
        for index, action in enumerate(row)
        if action.op is not Op.W
    }
    wires: dict[object, list[tuple[Channel, int, Action]]] = defaultdict(list)
    keys: dict[Channel, object] = {}
    for rank, row in enumerate(made):
        for pairs in row:
            for _, receive in pairs:
                is_forward = receive.op is Op.RECV_F
                channel = Channel(rank, stage_ranks[receive.stage], "F" if is_forward else "B")
                if channel not in keys:
                    keys[channel] = wire(transport, channel) or channel
                consumer = consumers.get((is_forward, receive.stage, receive.chunk))
                if consumer is not None:  # the verifier says what is missing
                    wires[keys[channel]].append((channel, consumer, receive))
    return wires


def _in_pair_order(
    orders: Sequence[Sequence[Action]], made: Made, stage_ranks: Sequence[int], routes: Routes
) -> list[list[Action]]:
    """Return the lists with send and receive at the same place of one order over all ranks."""
    rows: list[list[Action]] = [[] for _ in orders]
    for rank, position in compute_order_of(orders, stage_ranks, routes):
        rows[rank].append(orders[rank][position])
        for send, receive in made[rank][position]:
            rows[rank].append(send)
            rows[stage_ranks[receive.stage]].append(receive)
    return rows


def _transfers(action: Action, stage_ranks: Sequence[int], near: Neighbours) -> list[tuple[Action, Action]]:
    """Return the (send, receive) pairs of what `action` makes."""
    op, stage, chunk, _ = action
    if op is Op.F:
        peers, send, receive = near.readers[stage], Op.SEND_F, Op.RECV_F
    elif op is not Op.W:
        peers, send, receive = near.gradient_readers[stage], Op.SEND_B, Op.RECV_B
    else:
        return []
    here = stage_ranks[stage]
    return [
        (Action(send, stage, chunk, peer), Action(receive, peer, chunk, stage))
        for peer in peers
        if stage_ranks[peer] != here
    ]


def _input_transfers(rank: int, stage_ranks: Sequence[int], routes: Routes, transport: Transport) -> Iterator[Action]:
    """Yield a rank's SEND_X and RECV_X: receives first, but one order for both ends where a pair shares a queue."""
    pairs = sorted(pair for pair in routes.inputs if stage_ranks[pair[0]] != stage_ranks[pair[1]])
    if transport is not Transport.ORDERED:
        pairs = sorted(pairs, key=lambda pair: stage_ranks[pair[1]] != rank)
    for source, target in pairs:
        if stage_ranks[source] == rank:
            yield Action(Op.SEND_X, source, 0, target)
        elif stage_ranks[target] == rank:
            yield Action(Op.RECV_X, target, 0, source)


def _reductions(rank: int, stage_ranks: Sequence[int], routes: Routes) -> Iterator[Action]:
    own = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
    for stage in reversed(own):
        if stage in routes.reduced:
            yield Action(Op.REDUCE, stage, 0)
    for index, group in enumerate(routes.ties):
        if set(group) & set(own):
            yield Action(Op.TIE_SUM, group[0], index)
