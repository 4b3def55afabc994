"""The verifier: is a set of action lists a schedule that every rank can run to its end?

Checked before launch: each (stage, chunk) exactly once on its rank, F before B, every transfer paired, equal order at
both ends of each channel, and no cycle through program order, data and send credits. A bad one is refused with the
rank × step grid, an arrow at the cell and, for a deadlock, the cycle by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stagekit.errors import ScheduleError
from stagekit.plan.actions import COMPUTE, MATCHING_SEND, RECVS, SENDS, Action, Op
from stagekit.plan.lowering import Routes

SEND_CREDITS = 8  # sends of one channel that may be unfinished; posting number i waits for number i − 8

Cell = tuple[int, int]  # (rank, position in its list)


def verify(
    lists: Sequence[Sequence[Action]], stage_ranks: Sequence[int], num_chunks: int, routes: Routes
) -> tuple[Cell, ...]:
    """Return a linear extension: an order of all cells in which nothing ever waits.

    Raises ScheduleError, with the grid, for lists that are not a valid schedule of `routes`.
    """
    cells = _index(lists, stage_ranks)
    _check_compute(lists, cells, stage_ranks, num_chunks, has_backward=any(a.op is Op.B for row in lists for a in row))
    _check_transfers(lists, cells, stage_ranks, num_chunks, routes)
    _check_channel_order(lists, stage_ranks)
    return _linear_extension(lists, _dependencies(lists, cells, stage_ranks, routes))


def grid(lists: Sequence[Sequence[Action]], cell: Cell | None = None, *, width: int = 12) -> str:
    """Return the rank × step grid as text, `width` cells around `cell`, which an arrow marks."""
    start = max(0, cell[1] - width // 2) if cell else 0
    rows = []
    for rank, row in enumerate(lists):
        shown = [
            ("→" if (rank, position) == cell else "") + str(action)
            for position, action in enumerate(row)
            if start <= position < start + width
        ]
        if cell and cell[0] == rank and cell[1] >= len(row):
            shown.append("→(end)")
        rows.append(shown)
    wide = max((len(text) for row in rows for text in row), default=1)
    head = "…" if start else " "
    return "\n".join(f"rank {rank:>3} {head} " + " ".join(t.ljust(wide) for t in row) for rank, row in enumerate(rows))


def _fail(lists: Sequence[Sequence[Action]], cell: Cell, message: str) -> ScheduleError:
    return ScheduleError(f"{message} (rank {cell[0]}, step {cell[1]})\n{grid(lists, cell)}")


def _index(lists: Sequence[Sequence[Action]], stage_ranks: Sequence[int]) -> dict[Action, Cell]:
    cells: dict[Action, Cell] = {}
    for rank, row in enumerate(lists):
        for position, action in enumerate(row):
            cell = (rank, position)
            if not 0 <= action.stage < len(stage_ranks):
                raise _fail(lists, cell, f"{action}: there is no stage {action.stage}")
            if action.op is not Op.TIE_SUM:
                if stage_ranks[action.stage] != rank:
                    raise _fail(lists, cell, f"{action}: stage {action.stage} is on rank {stage_ranks[action.stage]}")
                if action in cells:
                    raise _fail(lists, cell, f"{action}: listed twice, first at step {cells[action][1]}")
                cells[action] = cell
    return cells


def _check_compute(
    lists: Sequence[Sequence[Action]],
    cells: dict[Action, Cell],
    stage_ranks: Sequence[int],
    num_chunks: int,
    *,
    has_backward: bool,
) -> None:
    for action, cell in cells.items():
        if action.op in COMPUTE and not 0 <= action.chunk < num_chunks:
            raise _fail(lists, cell, f"{action}: there is no chunk {action.chunk}")
    for stage, rank in enumerate(stage_ranks):
        for chunk in range(num_chunks):
            forward = cells.get(Action(Op.F, stage, chunk))
            backward = cells.get(Action(Op.B, stage, chunk))
            end = (rank, len(lists[rank]))
            if forward is None:
                raise _fail(lists, end, f"{stage}F{chunk} is missing")
            if has_backward and backward is None:
                raise _fail(lists, end, f"{stage}B{chunk} is missing")
            if backward is not None and backward[1] < forward[1]:
                raise _fail(lists, backward, f"{stage}B{chunk} comes before {stage}F{chunk}")


def _twin(action: Action) -> Action:
    """Return the SEND of a RECV and the other way round."""
    assert action.peer is not None
    for recv, send in MATCHING_SEND.items():
        if action.op is recv:
            return Action(send, action.peer, action.chunk, action.stage)
        if action.op is send:
            return Action(recv, action.peer, action.chunk, action.stage)
    raise AssertionError(action)


def _check_transfers(
    lists: Sequence[Sequence[Action]],
    cells: dict[Action, Cell],
    stage_ranks: Sequence[int],
    num_chunks: int,
    routes: Routes,
) -> None:
    for action, cell in cells.items():
        if action.op in SENDS or action.op in RECVS:
            if _twin(action) not in cells:
                raise _fail(lists, cell, f"{action}: nothing matches it, {_twin(action)} is missing")
            _check_transfer_place(lists, cells, action, cell)
    wanted = [(Op.RECV_F, target, source) for source, target in sorted(routes.forward)]
    wanted += [(Op.RECV_B, source, target) for source, target in sorted(routes.backward)]
    for op, stage, peer in wanted:
        if stage_ranks[stage] == stage_ranks[peer]:
            continue
        for chunk in range(num_chunks):
            if Action(op, stage, chunk, peer) not in cells:
                end = (stage_ranks[stage], len(lists[stage_ranks[stage]]))
                raise _fail(lists, end, f"{Action(op, stage, chunk, peer)} is missing")


def _check_transfer_place(
    lists: Sequence[Sequence[Action]], cells: dict[Action, Cell], action: Action, cell: Cell
) -> None:
    compute_op = {Op.SEND_F: Op.F, Op.RECV_F: Op.F, Op.SEND_B: Op.B, Op.RECV_B: Op.B}.get(action.op)
    if compute_op is None:
        return
    compute = Action(compute_op, action.stage, action.chunk)
    if compute not in cells:
        raise _fail(lists, cell, f"{action}: {compute} is missing")
    is_early = cell[1] < cells[compute][1]
    if action.op in SENDS and is_early:
        raise _fail(lists, cell, f"{action} comes before {compute}, which makes its data")
    if action.op in RECVS and not is_early:
        raise _fail(lists, cell, f"{action} comes after {compute}, which needs it")


def _channel(action: Action, stage_ranks: Sequence[int]) -> tuple[int, int, str]:
    assert action.peer is not None
    here, there = stage_ranks[action.stage], stage_ranks[action.peer]
    return (here, there, action.op[-1]) if action.op in SENDS else (there, here, action.op[-1])


def _check_channel_order(lists: Sequence[Sequence[Action]], stage_ranks: Sequence[int]) -> None:
    sends: dict[tuple[int, int, str], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int, str], list[tuple[Action, Cell]]] = defaultdict(list)
    for rank, row in enumerate(lists):
        for position, action in enumerate(row):
            if action.op in SENDS:
                sends[_channel(action, stage_ranks)].append(action)
            elif action.op in RECVS:
                receives[_channel(action, stage_ranks)].append((action, (rank, position)))
    for channel, received in receives.items():
        for (action, cell), sent in zip(received, sends[channel], strict=True):
            if _twin(action) != sent:
                raise _fail(
                    lists,
                    cell,
                    f"{action}: rank {channel[0]} sends {sent} to rank {channel[1]} at this point of the channel",
                )


def _dependencies(
    lists: Sequence[Sequence[Action]], cells: dict[Action, Cell], stage_ranks: Sequence[int], routes: Routes
) -> dict[Cell, list[Cell]]:
    """Return, for each cell, the cells that must have run before it."""
    needs: dict[Cell, list[Cell]] = {}
    for rank, row in enumerate(lists):
        for position in range(len(row)):
            needs[rank, position] = [(rank, position - 1)] if position else []
    for source, target in routes.forward:
        _link(needs, cells, stage_ranks, Op.F, Op.SEND_F, source, target)
    for source, target in routes.backward:
        _link(needs, cells, stage_ranks, Op.B, Op.SEND_B, target, source)
    for source, target in routes.inputs:
        send = cells.get(Action(Op.SEND_X, source, 0, target))
        for action, cell in cells.items():
            if send and action.op is Op.F and action.stage == target:
                needs[cell].append(send)
    posted: dict[tuple[int, int, str], list[Cell]] = defaultdict(list)
    for rank, row in enumerate(lists):
        for position, action in enumerate(row):
            if action.op in SENDS:
                channel = posted[_channel(action, stage_ranks)]
                is_answered = action.op is Op.SEND_F and (action.stage, action.peer) in routes.backward
                if len(channel) >= SEND_CREDITS and not is_answered:
                    waited = lists[channel[-SEND_CREDITS][0]][channel[-SEND_CREDITS][1]]
                    needs[rank, position].append(cells[_twin(waited)])
                channel.append((rank, position))
    return needs


def _link(
    needs: dict[Cell, list[Cell]],
    cells: dict[Action, Cell],
    stage_ranks: Sequence[int],
    op: Op,
    send_op: Op,
    giver: int,
    taker: int,
) -> None:
    for action, cell in cells.items():
        if action.op is op and action.stage == taker:
            local = stage_ranks[giver] == stage_ranks[taker]
            needs[cell].append(
                cells[Action(op, giver, action.chunk) if local else Action(send_op, giver, action.chunk, taker)]
            )


def _linear_extension(lists: Sequence[Sequence[Action]], needs: dict[Cell, list[Cell]]) -> tuple[Cell, ...]:
    position = [0] * len(lists)
    done: set[Cell] = set()
    order: list[Cell] = []
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(lists):
            while position[rank] < len(row) and all(n in done for n in needs[rank, position[rank]]):
                cell = (rank, position[rank])
                done.add(cell)
                order.append(cell)
                position[rank] += 1
                progress = True
    stuck = [(rank, position[rank]) for rank, row in enumerate(lists) if position[rank] < len(row)]
    if stuck:
        raise _fail(lists, stuck[0], "deadlock: " + _cycle(lists, needs, done, stuck[0]))
    return tuple(order)


def _cycle(lists: Sequence[Sequence[Action]], needs: dict[Cell, list[Cell]], done: set[Cell], start: Cell) -> str:
    path, seen, cell = [start], {start: 0}, start
    while True:
        cell = next(need for need in needs[cell] if need not in done)
        if cell in seen:
            names = [f"rank {r} {lists[r][p]}" for r, p in path[seen[cell] :]]
            return " waits for ".join([*names, names[0]])
        seen[cell] = len(path)
        path.append(cell)
