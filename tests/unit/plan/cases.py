"""Schedules at the sizes that the tests of stagekit.plan share."""

from stagekit.plan.actions import Op
from stagekit.plan.lowering import lower, window_of
from stagekit.plan.routes import Routes
from stagekit.plan.schedules.registry import NAMES, compute_order, table_for
from stagekit.plan.transports import Channel, Transport

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
    return (
        lower(orders, stage_ranks, routes, window=window_of(schedule, window), transport=transport),
        stage_ranks,
        routes,
    )


def rich_routes(schedule, num_stages, stage_ranks):
    """Return a chain with a value that skips stages, targets for the last stage, a tied weight and replicas."""
    pairs = {(s, s + 1) for s in range(num_stages - 1)} | {(0, num_stages - 1)}
    inputs = frozenset({(0, num_stages - 1)} if stage_ranks[0] != stage_ranks[-1] else ())
    if schedule == "forward":
        return Routes(frozenset(pairs), frozenset(), inputs)
    everyone = frozenset(range(num_stages))
    return Routes(frozenset(pairs), frozenset(pairs), inputs, ((0, num_stages - 1),), everyone)


def random_case(rng):
    """Return (schedule, table, chunks, routes, window, transport), anything that the schedule takes."""
    schedule, ranks, transport = rng.choice(NAMES), rng.randint(1, 4), rng.choice(list(Transport))
    more = [rng.randrange(ranks) for _ in range(rng.randint(0, ranks + 2))]
    stage_ranks = table(schedule, ranks)
    if schedule in ("1f1b", "zb-h1", "zb-h2", "eager-1f1b"):
        stage_ranks = tuple(sorted([*range(ranks), *more]))
    elif schedule in ("gpipe", "bfs", "forward", "zb-auto"):
        stage_ranks = tuple(rng.sample([*range(ranks), *more], ranks + len(more)))
    stages = range(len(stage_ranks))
    skips = {tuple(sorted(rng.sample(stages, 2))) for _ in range(rng.randint(0, 2)) if len(stages) > 1}
    forward = {(stage, stage + 1) for stage in stages[:-1]} | skips
    backward = {pair for pair in forward if schedule != "forward" and rng.random() < 0.9}
    inputs = {(0, rng.choice(stages[1:])) for _ in range(rng.randint(0, 2)) if len(stages) > 1}
    channels = [Channel(a, b, kind) for a in range(ranks) for b in range(ranks) for kind in "FB"]
    window = rng.choice([0, 1, 2, 3, None, {channel: rng.choice([0, 1, 2, None]) for channel in channels}])
    chunks = rng.randint(2 * ranks if schedule == "dualpipe-v" else 1, 11)
    return (
        schedule,
        stage_ranks,
        chunks,
        Routes(frozenset(forward), frozenset(backward), frozenset(inputs)),
        window,
        transport,
    )


def compute(row):
    return [action for action in row if action.op in (Op.F, Op.B, Op.I, Op.W)]


__all__ = ["NAMES", "TWO_PER_RANK", "Transport", "compute", "lowered", "random_case", "rich_routes", "table"]
