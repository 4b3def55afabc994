"""Bubble rates of the literature, to the last digit printed. Source and definitions: tests/goldens/schedules.json."""

import json
from pathlib import Path

import pytest

from stagekit.plan.costs import Costs
from stagekit.plan.routes import Routes
from stagekit.plan.schedules.registry import compute_order, placement
from stagekit.plan.timeline import simulate
from stagekit.plan.transports import Transport
from stagekit.plan.verify import verify

CELLS = json.loads((Path(__file__).parents[2] / "goldens" / "schedules.json").read_text())["cells"]
NAMES = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
# arXiv 2401.10241, Table 1: a layer holds sbh(34 + 5as/h) until its I and 32 sbh until its W; Table 3: a = 32, h = 4096,
# s = 1024 for the 6.2B model, whose cells the ZB-1p and ZB-2p rates are.
KEPT = 32 / (34 + 5 * 32 * 1024 / 4096)


def cells(*names):
    found = [cell for cell in CELLS if cell["schedule"] in names]
    assert found
    return pytest.mark.parametrize("cell", found, ids=lambda c: f"{c['schedule']}-p{c['p']}m{c['m']}F{c['T_F']:.0f}")


def timeline(schedule, cell, **options):
    """Times are of a rank; its stages take equal parts of them."""
    each = cell["chunks_per_rank"]
    num_stages = each * cell["p"]
    f, i, w = ((cell[name] / each,) * num_stages for name in ("T_F", "T_B", "T_W"))
    stage_ranks, routes = placement(num_stages, cell["p"]), Routes.chain(num_stages)
    costs = Costs(f, i, w, hop=cell["T_comm"], kept=KEPT)
    orders = compute_order(schedule, stage_ranks, cell["p"], cell["m"], costs=costs, **options)
    extension = verify(orders, stage_ranks, cell["m"], routes, transport=Transport.IMPLICIT)
    times = {"forward": f, "backward": costs.full_backward, "input_grad": i, "weight_grad": w}
    return simulate(orders, extension, stage_ranks, routes, **times, hop=costs.hop, kept=KEPT)


def rate(cost, cell):
    return (cost - cell["m"] * (cell["T_F"] + cell["T_B"] + cell["T_W"])) / cost


@cells("1F1B", "ZB-H1", "ZB-H2")
def test_schedules_made_by_hand_reproduce_the_published_bubble_rate(cell):
    result = timeline(NAMES[cell["schedule"]], cell)
    assert round(result.bubble_span, 4) == cell["published"]
    assert round(rate(result.cost, cell), 4) == cell["published"]


@cells("1F1B-I")
def test_interleaved_reproduces_the_published_bubble_rate_less_one_hop_per_rank(cell):
    cost = timeline("interleaved", cell).cost - cell["p"] * cell["T_comm"]
    assert round(rate(cost, cell), 4) == cell["published"]


@cells("ZB-1p", "ZB-2p")
def test_the_automatic_schedule_is_at_most_0_002_above_what_the_papers_search_found(cell):
    limit = {"ZB-1p": 1, "ZB-2p": 2}[cell["schedule"]] * cell["p"]
    result = timeline("zb-auto", cell, memory_limit=limit)
    assert max(result.peak_held) <= limit + 1e-9
    assert rate(result.cost, cell) <= cell["published"] + 0.002
