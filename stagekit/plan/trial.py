"""A schedule tried out on a chain of stages: its lists, verified, and the timeline that they would have. Pure.

`python -m stagekit.plan` shows one; a planner compares many. A deadlock is a result here, any other bad list an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagekit.errors import ScheduleError
from stagekit.plan.actions import COMPUTE, Action, Op
from stagekit.plan.costs import Costs
from stagekit.plan.dependencies import Cell
from stagekit.plan.lowering import Lists, Window, lower, window_of
from stagekit.plan.routes import Routes
from stagekit.plan.schedules import csv_file
from stagekit.plan.schedules.registry import compute_order
from stagekit.plan.timeline import Timeline, simulate_at
from stagekit.plan.transports import Transport
from stagekit.plan.verify import verify


@dataclass(frozen=True, slots=True)
class Trial:
    """Complete lists of each rank; their timeline, or the deadlock: who waits for whom, the last for the first."""

    lists: Lists
    stage_ranks: tuple[int, ...]
    num_chunks: int
    timeline: Timeline | None
    deadlock: tuple[str, ...] = ()
    refusal: str = ""  # the deadlock with its grid


def try_schedule(
    schedule: str,
    stage_ranks: Sequence[int],
    num_chunks: int,
    costs: Costs,
    *,
    transport: Transport = Transport.IMPLICIT,
    memory_limit: float | None = None,
    window: Window | str = "measured",
) -> Trial:
    """Make the lists of `schedule` for `transport` and time them. Raises ScheduleError, saying which numbers would do."""
    num_ranks = max(stage_ranks) + 1
    orders = compute_order(schedule, stage_ranks, num_ranks, num_chunks, costs=costs, memory_limit=memory_limit)
    ahead = window_of(schedule, window)
    return try_orders(orders, stage_ranks, num_chunks, costs, transport=transport, window=ahead)


def try_orders(
    orders: Sequence[Sequence[Action]],
    stage_ranks: Sequence[int],
    num_chunks: int,
    costs: Costs,
    *,
    transport: Transport = Transport.IMPLICIT,
    window: Window = 1,
) -> Trial:
    """Lower compute lists of a schedule for `transport`, verify and time them."""
    return _timed(_lowered(orders, stage_ranks, transport, window), stage_ranks, num_chunks, costs, transport)


def try_lists(
    lists: Sequence[Sequence[Action]],
    costs: Costs,
    *,
    num_chunks: int | None = None,
    transport: Transport = Transport.IMPLICIT,
    window: Window = 1,
) -> Trial:
    """Verify and time lists of the user's, as they are if they have transfers, else lowered for `transport`.

    Raises ScheduleError with the grid where they are no valid schedule.
    """
    stage_ranks = csv_file.table_of(lists)
    chunks = csv_file.num_chunks_of(lists) if num_chunks is None else num_chunks
    if all(action.op in COMPUTE for row in lists for action in row):
        verify(lists, stage_ranks, chunks, _routes_in(lists, len(stage_ranks)), transport=Transport.IMPLICIT)
        lists = _lowered(lists, stage_ranks, transport, window)
    return _timed(tuple(map(tuple, lists)), stage_ranks, chunks, costs, transport)


def _lowered(
    orders: Sequence[Sequence[Action]], stage_ranks: Sequence[int], transport: Transport, window: Window
) -> Lists:
    real = Transport.RENDEZVOUS if transport is Transport.IMPLICIT else transport
    return lower(orders, stage_ranks, _routes_in(orders, len(stage_ranks)), window=window, transport=real)


def _timed(lists: Lists, stage_ranks: Sequence[int], num_chunks: int, costs: Costs, transport: Transport) -> Trial:
    routes = _routes_in(lists, len(stage_ranks))
    try:
        extension: tuple[Cell, ...] = verify(lists, stage_ranks, num_chunks, routes, transport=transport)
    except ScheduleError as error:
        if not error.cycle:
            raise
        return Trial(lists, tuple(stage_ranks), num_chunks, None, error.cycle, str(error))
    timeline = simulate_at(costs, lists, extension, stage_ranks, routes, transport=transport)
    return Trial(lists, tuple(stage_ranks), num_chunks, timeline)


def _routes_in(lists: Sequence[Sequence[Action]], num_stages: int) -> Routes:
    """Return the routes of a chain, and of what the lists send besides."""
    trains = any(action.op in (Op.B, Op.I, Op.W) for row in lists for action in row)
    chain = Routes.chain(num_stages, train=trains)
    sent = {
        op: {
            (action.stage, action.peer)
            for row in lists
            for action in row
            if action.op is op and action.peer is not None
        }
        for op in (Op.SEND_F, Op.SEND_B, Op.SEND_X)
    }
    return Routes(
        chain.forward | {(source, target) for source, target in sent[Op.SEND_F] if source < target},
        chain.backward | {(source, target) for target, source in sent[Op.SEND_B] if source < target},
        frozenset(sent[Op.SEND_X]),
        reduced=frozenset(action.stage for row in lists for action in row if action.op is Op.REDUCE),
    )
