"""What waits for what: the graph of action lists on a transport, an order in which nothing waits, or the cycle.

Nodes are the cells of the lists, the messages between them and the sums of tied weights. stagekit.plan.verify asks
before a launch; stagekit.plan.lowering for the order of bare compute lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from stagekit.plan.actions import RECVS, SENDS, Action, Op
from stagekit.plan.credits import SEND_CREDITS, uses_credit
from stagekit.plan.routes import Neighbours, Routes
from stagekit.plan.transports import Channel, Message, Transport, message_of, wire

Cell = tuple[int, int]  # (rank, position in its list)


class Graph:
    """Cells, then messages and sums, numbered; `needs[node]` must be over before `node` is."""

    def __init__(self, lists: Sequence[Sequence[Action]]) -> None:
        self.lists = lists
        self.cells: list[Cell] = [(rank, i) for rank, row in enumerate(lists) for i in range(len(row))]
        self.needs: list[list[int]] = [[node - 1] if i else [] for node, (_, i) in enumerate(self.cells)]
        self.names: list[str] = []  # of the nodes that are no cells

    def add(self, name: str, needs: list[int]) -> int:
        """Add a node that is no cell, and return its number."""
        self.names.append(name)
        self.needs.append(needs)
        return len(self.needs) - 1

    def name(self, node: int) -> str:
        """Return a node's name for an error."""
        if node >= len(self.cells):
            return self.names[node - len(self.cells)]
        rank, position = self.cells[node]
        return f"rank {rank} {self.lists[rank][position]}"

    def order(self) -> tuple[list[int], set[int]]:
        """Return nodes in an order in which nothing waits (the lowest number first), and the nodes that never run."""
        followers: list[list[int]] = [[] for _ in self.needs]
        missing = [len(needs) for needs in self.needs]
        for node, needs in enumerate(self.needs):
            for need in needs:
                followers[need].append(node)
        ready = [node for node, count in enumerate(missing) if not count]
        heapify(ready)
        order = []
        while ready:
            node = heappop(ready)
            order.append(node)
            for follower in followers[node]:
                missing[follower] -= 1
                if not missing[follower]:
                    heappush(ready, follower)
        return order, {node for node, count in enumerate(missing) if count}

    def cycle(self, stuck: set[int]) -> list[int]:
        """Return a cycle among nodes that never run; each waits for the next, the last for the first.

        Only its first and last cell is kept of a stretch along one list.
        """
        node = min(stuck)
        path, seen = [node], {node: 0}
        while True:
            node = next(need for need in self.needs[node] if need in stuck)
            if node in seen:
                break
            seen[node] = len(path)
            path.append(node)
        loop = path[seen[node] :]
        turn = [self._is_step(loop[i - 1], node) for i, node in enumerate(loop)]
        return [node for i, node in enumerate(loop) if not (turn[i] and turn[(i + 1) % len(loop)])]

    def _is_step(self, node: int, need: int) -> bool:
        """Say whether `node` waits for `need` because it comes next in the same list."""
        return need == node - 1 and node < len(self.cells) and self.cells[node][1] > 0


def lists_graph(
    lists: Sequence[Sequence[Action]], stage_ranks: Sequence[int], routes: Routes, transport: Transport
) -> Graph:
    """Return the graph of complete lists whose transfers pair up."""
    graph = Graph(lists)
    nodes = {lists[rank][i]: node for node, (rank, i) in enumerate(graph.cells) if lists[rank][i].op is not Op.TIE_SUM}
    if transport is Transport.IMPLICIT:
        link = _implicit(nodes)
    else:
        arrivals = _add_messages(graph, stage_ranks, transport)
        if transport is not Transport.EAGER:
            _add_credits(graph, arrivals, stage_ranks, routes)
        link = _linked(nodes, arrivals, stage_ranks)
    _link_compute(graph, link, len(stage_ranks), routes)
    _add_tie_sums(graph)
    return graph


def compute_order_of(orders: Sequence[Sequence[Action]], stage_ranks: Sequence[int], routes: Routes) -> list[Cell]:
    """Return the cells of bare compute lists by the time they end if each took one unit. Cells of a cycle are left out."""
    graph = lists_graph(orders, stage_ranks, routes, Transport.IMPLICIT)
    end = [0] * len(graph.needs)
    order, _ = graph.order()
    for node in order:
        end[node] = max((end[need] for need in graph.needs[node]), default=0) + 1
    return [graph.cells[node] for node in sorted(order, key=lambda node: (end[node], node))]


Link = Callable[[Message], int | None]


def _implicit(nodes: dict[Action, int]) -> Link:
    """Return what finds the maker of a value."""

    def find(message: Message) -> int | None:
        kind, source, _, chunk = message
        if kind == "X":
            return None
        if kind == "F":
            return nodes.get(Action(Op.F, source, chunk))
        full = nodes.get(Action(Op.B, source, chunk))
        return nodes.get(Action(Op.I, source, chunk)) if full is None else full

    return find


def _linked(nodes: dict[Action, int], arrivals: dict[Message, int], stage_ranks: Sequence[int]) -> Link:
    """Return what finds the arrival of a message, or its maker where both stages are on one rank."""
    local = _implicit(nodes)

    def find(message: Message) -> int | None:
        if stage_ranks[message.source] == stage_ranks[message.target]:
            return local(message)
        return arrivals.get(message)

    return find


def _link_compute(graph: Graph, link: Link, num_stages: int, routes: Routes) -> None:
    near = Neighbours(routes, num_stages)
    inputs: dict[int, list[int]] = defaultdict(list)
    for source, target in sorted(routes.inputs):
        inputs[target].append(source)
    for node, (rank, position) in enumerate(graph.cells):
        action = graph.lists[rank][position]
        stage, chunk = action.stage, action.chunk
        if action.op is Op.F:
            wanted = [Message("F", maker, stage, chunk) for maker in near.makers[stage]]
            wanted += [Message("X", source, stage, 0) for source in inputs.get(stage, ())]
        elif action.op in (Op.B, Op.I):
            wanted = [Message("B", maker, stage, chunk) for maker in near.gradient_makers[stage]]
        else:
            continue
        graph.needs[node] += [need for need in map(link, wanted) if need is not None]


def _add_messages(graph: Graph, stage_ranks: Sequence[int], transport: Transport) -> dict[Message, int]:
    """Add the arrival of every message that is sent; see Note [Arrival] in stagekit.plan.transports."""
    arrivals: dict[Message, int] = {}
    for sending in (True, False):
        for node, (rank, position) in enumerate(graph.cells):
            action = graph.lists[rank][position]
            if action.op not in (SENDS if sending else RECVS) or action.peer is None:
                continue
            message = message_of(action.op, action.stage, action.chunk, action.peer)
            if sending:
                arrivals[message] = graph.add(f"the arrival of {action}", [node])
            elif transport is not Transport.EAGER:
                graph.needs[arrivals[message]].append(node)
    if transport in (Transport.ORDERED, Transport.DIRECTED):
        _add_queues(graph, arrivals, stage_ranks, transport)
    return arrivals


def _add_queues(graph: Graph, arrivals: dict[Message, int], stage_ranks: Sequence[int], transport: Transport) -> None:
    """Let each message wait for the one before it in the queue of either end."""
    for row in graph.lists:
        last: dict[object, int] = {}
        for action in row:
            if (action.op in SENDS or action.op in RECVS) and action.peer is not None:
                message = message_of(action.op, action.stage, action.chunk, action.peer)
                ends = stage_ranks[message.source], stage_ranks[message.target]
                queue, node = wire(transport, Channel(*ends, message.kind)), arrivals[message]
                if queue in last:
                    graph.needs[node].append(last[queue])
                last[queue] = node


def _add_credits(graph: Graph, arrivals: dict[Message, int], stage_ranks: Sequence[int], routes: Routes) -> None:
    """Let a send wait for the arrival that frees its credit."""
    trains = any(action.op in (Op.B, Op.I) for row in graph.lists for action in row)
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for node, (rank, position) in enumerate(graph.cells):
        op, stage, chunk, peer = graph.lists[rank][position]
        if peer is None or not uses_credit(op, stage, peer, routes, trains=trains):
            continue
        queue = sent[stage, stage_ranks[peer]]
        if len(queue) >= SEND_CREDITS:
            graph.needs[node].append(queue[-SEND_CREDITS])
        queue.append(arrivals[message_of(op, stage, chunk, peer)])


def _add_tie_sums(graph: Graph) -> None:
    """Let every rank wait in TIE_SUM until all ranks of the group have come there."""
    groups: dict[int, list[int]] = defaultdict(list)
    for node, (rank, position) in enumerate(graph.cells):
        if graph.lists[rank][position].op is Op.TIE_SUM:
            groups[graph.lists[rank][position].chunk].append(node)
    for group, members in sorted(groups.items()):
        total = graph.add(f"the sum of tie group {group}", members)
        for node in members:
            rank, position = graph.cells[node]
            if position + 1 < len(graph.lists[rank]):
                graph.needs[node + 1].append(total)
