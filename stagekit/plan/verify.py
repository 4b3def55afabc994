"""The verifier: is a set of action lists a schedule that every rank can run to its end?

Checked before launch: each (stage, chunk) exactly once on its rank (F, then B, or I and W), every transfer paired and
beside what makes or needs its data, equal order at both ends of each channel, gradient sums after the last gradient,
and no cycle through program order, data, queues and send credits. A bad one is refused with the rank × step grid, an
arrow at the cell and, for a deadlock, the cycle by name. Called by stagekit.plan.plan and `python -m stagekit.plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from stagekit.plan.actions import COMPUTE, RECVS, SENDS, Action, Op
from stagekit.plan.credits import SEND_CREDITS as SEND_CREDITS
from stagekit.plan.dependencies import Cell as Cell
from stagekit.plan.dependencies import lists_graph
from stagekit.plan.grid import grid as grid
from stagekit.plan.grid import refusal
from stagekit.plan.routes import Routes
from stagekit.plan.transports import Channel, Transport, message_of

Lists = Sequence[Sequence[Action]]


def verify(
    lists: Lists,
    stage_ranks: Sequence[int],
    num_chunks: int,
    routes: Routes,
    *,
    transport: Transport = Transport.RENDEZVOUS,
) -> tuple[Cell, ...]:
    """Return a linear extension: an order of all cells in which nothing ever waits.

    Under the implicit transport lists may come without any transfer. Raises ScheduleError, with the grid, for lists
    that are not a valid schedule of `routes` or deadlock on `transport`; the error's `cycle` names who waits for whom.
    """
    cells = _index(lists, stage_ranks, num_chunks)
    _check_compute(lists, cells, stage_ranks, num_chunks, routes)
    if transport is not Transport.IMPLICIT or any(action.peer is not None for action in cells):
        _check_transfers(lists, cells, stage_ranks, num_chunks, routes)
        _check_channel_order(lists, stage_ranks)
    _check_reductions(lists, cells, stage_ranks, routes)
    graph = lists_graph(lists, stage_ranks, routes, transport)
    order, stuck = graph.order()
    if stuck:
        loop = graph.cycle(stuck)
        names = [graph.name(node) for node in loop]
        cell = graph.cells[next(node for node in (*loop, *sorted(stuck)) if node < len(graph.cells))]
        text = " waits for ".join([*names, names[0]])
        raise refusal(lists, cell, f"deadlock: {text}, on the {transport} transport", names)
    return tuple(graph.cells[node] for node in order if node < len(graph.cells))


def _index(lists: Lists, stage_ranks: Sequence[int], num_chunks: int) -> dict[Action, Cell]:
    """Return where each action is; each is on its stage's rank, once, and of a stage and a chunk that exist."""
    cells: dict[Action, Cell] = {}
    for rank, row in enumerate(lists):
        for position, action in enumerate(row):
            cell = (rank, position)
            if not 0 <= action.stage < len(stage_ranks):
                raise refusal(lists, cell, f"{action}: there is no stage {action.stage}")
            if action.peer is not None and action.op not in SENDS and action.op not in RECVS:
                raise refusal(lists, cell, f"{action}: there is no stage at its other end")
            if action.op is Op.TIE_SUM:
                continue  # named after a stage of its group, and on every rank of it
            if stage_ranks[action.stage] != rank:
                raise refusal(lists, cell, f"{action}: stage {action.stage} is on rank {stage_ranks[action.stage]}")
            if action in cells:
                raise refusal(lists, cell, f"{action}: listed twice, first at step {cells[action][1]}")
            if not 0 <= action.chunk < (1 if action.op in _ONCE else num_chunks):
                raise refusal(lists, cell, f"{action}: there is no chunk {action.chunk}")
            cells[action] = cell
    return cells


_ONCE = frozenset({Op.SEND_X, Op.RECV_X, Op.REDUCE})


def _check_compute(
    lists: Lists, cells: dict[Action, Cell], stage_ranks: Sequence[int], num_chunks: int, routes: Routes
) -> None:
    """Each stage runs each chunk once; lists may be forward only where no gradient has to return."""
    trains = bool(routes.backward) or any(action.op in COMPUTE and action.op is not Op.F for action in cells)
    for stage, rank in enumerate(stage_ranks):
        for chunk in range(num_chunks):
            f, b, i, w = (cells.get(Action(op, stage, chunk)) for op in (Op.F, Op.B, Op.I, Op.W))
            end = (rank, len(lists[rank]))
            if f is None:
                raise refusal(lists, end, f"{stage}F{chunk} is missing")
            if b is not None and (i is not None or w is not None):
                half = f"{stage}{'W' if i is None else 'I'}{chunk}"
                raise refusal(lists, b, f"{stage}B{chunk} and {half}: a full backward is I and W at once")
            if trains and b is None:
                if i is None and w is None:
                    raise refusal(lists, end, f"{stage}B{chunk} is missing (or {stage}I{chunk} and {stage}W{chunk})")
                if i is None or w is None:
                    raise refusal(lists, end, f"{stage}{'I' if i is None else 'W'}{chunk} is missing")
            order = [(cell, op) for cell, op in ((f, "F"), (b, "B"), (i, "I"), (w, "W")) if cell is not None]
            for (before, first), (after, second) in pairwise(order):
                if after < before:
                    raise refusal(lists, after, f"{stage}{second}{chunk} comes before {stage}{first}{chunk}")


def _twin(action: Action) -> Action:
    """Return the SEND of a RECV and the other way round."""
    assert action.peer is not None
    return Action(_OTHER_END[action.op], action.peer, action.chunk, action.stage)


_OTHER_END = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B, Op.SEND_X: Op.RECV_X}
_OTHER_END |= {receive: send for send, receive in _OTHER_END.items()}


def _check_transfers(
    lists: Lists, cells: dict[Action, Cell], stage_ranks: Sequence[int], num_chunks: int, routes: Routes
) -> None:
    trains = any(action.op in (Op.B, Op.I) for action in cells)
    wanted = [Action(Op.RECV_X, target, 0, source) for source, target in sorted(routes.inputs)]
    for chunk in range(num_chunks):
        wanted += [Action(Op.RECV_F, target, chunk, source) for source, target in sorted(routes.forward)]
        if trains:
            wanted += [Action(Op.RECV_B, source, chunk, target) for source, target in sorted(routes.backward)]
    receives = {a for a in wanted if a.peer is not None and stage_ranks[a.stage] != stage_ranks[a.peer]}
    for action, cell in cells.items():
        if action.op in SENDS or action.op in RECVS:
            if action.peer is None or not 0 <= action.peer < len(stage_ranks):
                raise refusal(lists, cell, f"{action}: there is no stage {action.peer} to exchange it with")
            if _twin(action) not in cells:
                raise refusal(lists, cell, f"{action}: nothing matches it, {_twin(action)} is missing")
            if (action if action.op in RECVS else _twin(action)) not in receives:
                raise refusal(
                    lists, cell, f"{action}: nothing has to go between stages {action.stage} and {action.peer}"
                )
            _check_transfer_place(lists, cells, action, cell)
    for action in wanted:
        if action in receives and action not in cells:
            rank = stage_ranks[action.stage]
            raise refusal(lists, (rank, len(lists[rank])), f"{action} is missing")


def _check_transfer_place(lists: Lists, cells: dict[Action, Cell], action: Action, cell: Cell) -> None:
    """A send comes after what makes its data, a receive before what needs it."""
    if action.op is Op.SEND_X:
        return
    if action.op is Op.RECV_X:
        uses = [(c, a) for a, c in cells.items() if a.op is Op.F and a.stage == action.stage]
        at, compute = min(uses)
    else:
        ops = (Op.F,) if action.op in (Op.SEND_F, Op.RECV_F) else (Op.B, Op.I)
        found = [a for a in (Action(op, action.stage, action.chunk) for op in ops) if a in cells]
        at, compute = cells[found[0]], found[0]
    is_early = cell[1] < at[1]
    if action.op in SENDS and is_early:
        raise refusal(lists, cell, f"{action} comes before {compute}, which makes its data")
    if action.op in RECVS and not is_early:
        raise refusal(lists, cell, f"{action} comes after {compute}, which needs it")


def _check_channel_order(lists: Lists, stage_ranks: Sequence[int]) -> None:
    sends: dict[Channel, list[Action]] = defaultdict(list)
    receives: dict[Channel, list[tuple[Action, Cell]]] = defaultdict(list)
    for rank, row in enumerate(lists):
        for position, action in enumerate(row):
            if action.peer is None:
                continue
            message = message_of(action.op, action.stage, action.chunk, action.peer)
            channel = Channel(stage_ranks[message.source], stage_ranks[message.target], message.kind)
            if action.op in SENDS:
                sends[channel].append(action)
            else:
                receives[channel].append((action, (rank, position)))
    for channel, received in receives.items():
        for (action, cell), sent in zip(received, sends[channel], strict=True):
            if _twin(action) != sent:
                raise refusal(
                    lists,
                    cell,
                    f"{action}: rank {channel.source_rank} sends {sent} to rank {channel.target_rank} at this point of "
                    "the channel",
                )


def _check_reductions(lists: Lists, cells: dict[Action, Cell], stage_ranks: Sequence[int], routes: Routes) -> None:
    """Gradients are summed over replicas once per stage, then over tied stages, each after the last gradient."""
    last = dict.fromkeys(range(len(stage_ranks)), 0)  # step of a stage's last gradient, then of its REDUCE
    for action, cell in cells.items():
        if action.op in (Op.B, Op.W):
            last[action.stage] = max(last[action.stage], cell[1])
    for stage, rank in enumerate(stage_ranks):
        action = Action(Op.REDUCE, stage, 0)
        at = cells.get(action)
        if at is None:
            if stage in routes.reduced:
                raise refusal(lists, (rank, len(lists[rank])), f"{action} is missing")
            continue
        if stage not in routes.reduced:
            raise refusal(lists, at, f"{action}: stage {stage} has nothing to sum over replicas")
        if at[1] < last[stage]:
            raise refusal(lists, at, f"{action} comes before {lists[rank][last[stage]]}, whose gradient it sums")
        last[stage] = at[1]
    for rank, row in enumerate(lists):
        _check_tie_sums(lists, rank, row, stage_ranks, routes, last)


def _check_tie_sums(
    lists: Lists, rank: int, row: Sequence[Action], stage_ranks: Sequence[int], routes: Routes, last: dict[int, int]
) -> None:
    wanted = {
        Action(Op.TIE_SUM, group[0], number): [stage for stage in group if stage_ranks[stage] == rank]
        for number, group in enumerate(routes.ties)
        if any(stage_ranks[stage] == rank for stage in group)
    }
    for position, action in enumerate(row):
        if action.op is Op.TIE_SUM:
            if action in row[:position]:
                raise refusal(lists, (rank, position), f"{action}: listed twice, first at step {row.index(action)}")
            if action not in wanted:
                raise refusal(lists, (rank, position), f"{action}: there is no such sum on this rank")
            step = max(last[stage] for stage in wanted.pop(action))
            if position < step:
                raise refusal(lists, (rank, position), f"{action} comes before {row[step]}, whose gradient it sums")
    for action in wanted:
        raise refusal(lists, (rank, len(row)), f"{action} is missing")
