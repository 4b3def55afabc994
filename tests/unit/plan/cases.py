"""Schedules at the sizes that the tests of stagekit.plan share."""

from stagekit.plan.actions import Op
from stagekit.plan.lowering import lower, receive_window
from stagekit.plan.routes import Routes
from stagekit.plan.schedules import NAMES, compute_order, table_for
from stagekit.plan.transports import Transport

TWO_PER_RANK = ("zb-v", "v-half", "dualpipe-v", "bfs", "interleaved")


def table(schedule, ranks):
    return table_for(schedule, ranks * (2 if schedule in TWO_PER_RANK else 1), ranks)


def lowered(
    schedule, ranks, chunks, *, transport=Transport.RENDEZVOUS, routes=None, stage_ranks=None, window="measured"
):
    """Return (lists, stage_ranks, routes) of a schedule."""
    stage_ranks = stage_ranks or table(schedule, ranks)
    routes = routes or Routes.chain(len(stage_ranks), train=schedule != "forward")
    orders = compute_order(schedule, stage_ranks, ranks, chunks)
    ahead = receive_window(schedule) if window == "measured" else window
    return lower(orders, stage_ranks, routes, window=ahead, transport=transport), stage_ranks, routes


def rich_routes(schedule, num_stages, stage_ranks):
    """Return a chain with a value that skips stages, targets for the last stage, a tied weight and replicas."""
    pairs = {(s, s + 1) for s in range(num_stages - 1)} | {(0, num_stages - 1)}
    inputs = frozenset({(0, num_stages - 1)} if stage_ranks[0] != stage_ranks[-1] else ())
    if schedule == "forward":
        return Routes(frozenset(pairs), frozenset(), inputs)
    everyone = frozenset(range(num_stages))
    return Routes(frozenset(pairs), frozenset(pairs), inputs, ((0, num_stages - 1),), everyone)


def compute(row):
    return [action for action in row if action.op in (Op.F, Op.B, Op.I, Op.W)]


__all__ = ["NAMES", "TWO_PER_RANK", "Transport", "compute", "lowered", "rich_routes", "table"]
