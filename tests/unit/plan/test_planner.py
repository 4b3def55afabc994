"""The planner: its winner is what trying everything finds, memory comes first, losers say why they lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from stagekit.errors import ScheduleError, SplitError
from stagekit.plan.actions import Op
from stagekit.plan.costs import Link
from stagekit.plan.forecast import forecast
from stagekit.plan.memory import Footprint, Held
from stagekit.plan.planner.candidates import Wish, chunk_counts, is_worth_trying, schedules_for
from stagekit.plan.planner.chain import Chain, Setting, bound_of, bytes_of, costs_of
from stagekit.plan.planner.search import ALIKE, rank_plans
from stagekit.plan.schedules.registry import compute_order, table_for

FREE = Link(latency_s=0.0, bytes_per_s=1e30, action_s=0.0)
HAND_MADE = tuple(name for name in schedules_for("auto") if name != "zb-auto")


def chain(forward, *, waits=True, crossing_bytes=0.0, footprint=None):
    """A chain whose backward takes twice its forward, half of it for a weight of its own."""
    num = len(forward)
    weights = tuple(f"w{i}" if waits else None for i in range(num))
    halves = (tuple(forward), tuple(forward)) if waits else (tuple(2 * f for f in forward), (0.0,) * num)
    return Chain(
        tuple(forward), tuple(2 * f for f in forward), *halves, weights, (0.0,) * num, (crossing_bytes,) * num,
        tuple(range(1, num)), {f"w{i}": (i,) for i in range(num)}, footprint,
    )  # fmt: skip


def setting(ranks, **more):
    return Setting(ranks, (1.0,) * ranks, **{"link": FREE, **more})


def ranked(made, ranks, *, schedules=HAND_MADE, per_rank=(1,), chunks=(4,), **more):
    wish = Wish(ranks, schedules, per_rank, chunks)
    return rank_plans(dict.fromkeys(chunks, made), wish, setting(ranks, **more))


def fastest_of_all(made, ranks, per_rank, chunks, settings):
    """The shortest step of every schedule under every cut."""
    steps = {}
    for schedule, v, m in itertools.product(HAND_MADE, per_rank, chunks):
        try:
            table = table_for(schedule, ranks * v, ranks)
            orders = compute_order(schedule, table, ranks, m)
        except ScheduleError:
            continue
        for cut in itertools.combinations(made.legal, ranks * v - 1):
            costs = costs_of(made, (0, *cut), table, settings)
            steps[schedule, v, m, cut] = forecast(orders, table, costs).makespan
    return steps


@pytest.mark.parametrize("forward", [(1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1, 1), (1, 2, 1, 2, 1, 2, 1, 2), (4, 4, 2, 2)])
@pytest.mark.parametrize("waits", [True, False])
def test_the_winner_is_the_fastest_of_everything_that_can_be_tried(forward, waits):
    made = chain(list(map(float, forward)), waits=waits)
    per_rank, chunks = (1, 2), (2, 4)
    found = ranked(made, 2, per_rank=per_rank, chunks=chunks)
    steps = fastest_of_all(made, 2, per_rank, chunks, setting(2))
    winner, told = found.winner, found.winner.candidate
    assert winner.step_s <= min(steps.values()) * (1 + ALIKE)
    assert winner.step_s == pytest.approx(steps[told.schedule, told.stages_per_rank, told.chunks, winner.begins[1:]])


def test_equally_fast_plans_are_told_apart_by_what_they_hold():
    held = tuple(Held((i,), 0, 100) for i in range(4))
    made = chain([1.0] * 4, waits=False, footprint=Footprint(held, (0,) * 5, 0))
    found = ranked(made, 2, schedules=("gpipe", "1f1b"), chunks=(8,))
    assert [each.candidate.schedule for each in found.best] == ["1f1b", "gpipe"]
    assert found.best[0].step_s == found.best[1].step_s
    assert [each.peak_bytes for each in found.best] == [2 * 200, 8 * 200]


def test_what_breaks_the_memory_cap_is_dropped_and_says_what_it_needs():
    held = tuple(Held((i,), 50, 100) for i in range(4))
    made = chain([1.0] * 4, footprint=Footprint(held, (0,) * 5, 7))
    found = ranked(made, 2, schedules=("gpipe", "1f1b"), chunks=(8,), memory_bytes=600)
    assert [each.candidate.schedule for each in found.best] == ["1f1b"]
    (refused,) = found.refused
    assert refused.refusal == "needs 1.667 KiB on rank 0, the cap is 600 bytes"
    assert refused.needs_bytes == 2 * 50 + 8 * 2 * 100 + 7


def test_a_cut_that_is_less_even_is_taken_where_only_that_fits():
    held = (Held((0,), 0, 100), Held((1,), 0, 100), Held((2,), 0, 150), Held((3,), 0, 10))
    made = chain([1.0] * 4, footprint=Footprint(held, (0,) * 5, 0))
    assert ranked(made, 2, schedules=("1f1b",)).winner.begins == (0, 2)
    assert ranked(made, 2, schedules=("1f1b",), memory_bytes=400).winner.begins == (0, 2)
    assert ranked(made, 2, schedules=("1f1b",), memory_bytes=399).winner.begins == (0, 1)


def test_where_nothing_fits_the_least_that_is_needed_is_told():
    held = tuple(Held((i,), 50, 100) for i in range(4))
    made = chain([1.0] * 4, footprint=Footprint(held, (0,) * 5, 0))
    with pytest.raises(SplitError, match=r"no plan fits the memory cap of 99 bytes on each of 2 ranks: 2 were tried, the"
                       r" most modest needs 500 bytes \(1f1b, 4 chunks\); use more ranks"):  # fmt: skip
        ranked(made, 2, schedules=("gpipe", "1f1b"), memory_bytes=99)


def test_halves_of_a_backward_do_not_pay_where_no_weight_can_wait():
    free, bound = chain([1.0] * 8), chain([1.0] * 8, waits=False)
    steps = {
        (name, waits): ranked(made, 4, schedules=(name,), chunks=(8,)).winner.step_s
        for name in ("1f1b", "zb-h1")
        for waits, made in ((True, free), (False, bound))
    }
    assert steps["zb-h1", True] < steps["1f1b", True]
    assert steps["zb-h1", False] >= steps["1f1b", False]
    assert ranked(bound, 4, schedules=("zb-h1", "1f1b"), chunks=(8,)).winner.candidate.schedule == "1f1b"


def test_a_weight_that_its_stage_reads_twice_waits_only_where_a_cut_parts_its_readers():
    made = replace(chain([1.0] * 4), weights=("w", "w", "w2", "w3"), readers={"w": (0, 1), "w2": (2,), "w3": (3,)})
    assert made.halves_of(0, 2) == (4.0, 0.0)
    assert made.halves_of(1, 3) == (2.0, 2.0)


def test_compiled_stages_and_the_first_one_run_their_whole_backward_at_once():
    made, table = chain([1.0] * 4), (0, 1)
    eager = costs_of(made, (0, 2), table, setting(2))
    assert (eager.input_grad, eager.weight_grad) == ((4.0, 2.0), (0.0, 2.0))
    compiled = costs_of(made, (0, 2), table, setting(2, compiled=True))
    assert (compiled.input_grad, compiled.weight_grad) == ((4.0, 4.0), (0.0, 0.0))


def test_recomputing_costs_every_stage_but_the_last_its_forward_again():
    costs = costs_of(chain([1.0] * 4), (0, 2), (0, 1), setting(2, recompute=True))
    assert costs.full_backward == (6.0, 4.0) and costs.input_grad == (6.0, 2.0)


def test_a_hop_is_paid_for_the_largest_cut_and_makes_a_longer_warm_up_win():
    slow = Link(latency_s=0.0, bytes_per_s=1.0, action_s=0.0)
    made = chain([1.0] * 8, waits=False, crossing_bytes=2.0)
    found = ranked(made, 4, schedules=("1f1b", "eager-1f1b"), chunks=(16,), link=slow)
    assert found.winner.candidate.schedule == "eager-1f1b"
    assert found.winner.costs is not None and found.winner.costs.hop == 2.0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_no_plan_is_faster_than_the_bound(waits, recompute):
    for forward in ((1.0,) * 8, (1.0, 5.0, 1.0, 1.0, 2.0, 1.0, 1.0, 3.0)):
        made = chain(list(forward), waits=waits, crossing_bytes=1.0)
        link = Link(latency_s=0.1, bytes_per_s=4.0, action_s=0.01)
        found = ranked(made, 4, per_rank=(1, 2), chunks=(1, 4, 8), recompute=recompute, link=link)
        for each in found.best:
            assert (
                each.step_s >= bound_of(made, each.candidate.chunks, setting(4, recompute=recompute, link=link)) - 1e-9
            )
        assert found.gap(found.winner) >= -1e-12


def test_one_stage_alone_reaches_the_bound():
    found = ranked(chain([1.0] * 3), 1, per_rank=(1,), chunks=(5,))
    assert found.winner.candidate.schedule == "1f1b" and found.gap(found.winner) == pytest.approx(0.0)


def test_what_a_rank_holds_is_counted_as_its_list_runs():
    held = (Held((0, 1), 1000, 10), Held((2,), 100, 20), Held((3,), 0, 40))
    made = chain([1.0] * 4, footprint=Footprint(held, (0, 1, 2, 3, 0), 5))
    table = (0, 1, 1, 0)
    orders = compute_order("zb-v", table, 2, 4)
    chunk = [10, 11, 22, 43]
    expected = []
    for rank, row in enumerate(orders):
        level = peak = 0
        for action in row:
            level += {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0) * chunk[action.stage]
            peak = max(peak, level)
        expected.append(peak + (1000, 1100)[rank] + 5)
    assert list(bytes_of(made, (0, 1, 2, 3), table, orders)) == expected


def test_a_cut_of_another_policy_is_kept_and_only_the_schedule_chosen():
    made = chain([1.0] * 8)
    wish = Wish(2, HAND_MADE, (1, 2), (4,))
    found = rank_plans({4: made}, wish, setting(2), cuts={2: (0, 1)})
    assert {each.begins for each in found.best} == {(0, 1)}
    assert any("makes no 4 stages" in each.refusal for each in found.refused)


def test_a_faster_rank_gets_more_of_the_chain():
    made = chain([1.0] * 6, waits=False)
    fast = replace(setting(2), speeds=(2.0, 1.0))
    found = rank_plans({4: made}, Wish(2, ("1f1b",), (1,), (4,)), fast)
    assert found.winner.begins == (0, 4)
    assert found.winner.costs is not None and found.winner.costs.forward == (2.0, 2.0)


def test_schedules_that_are_another_one_under_a_second_name_are_tried_once():
    tried = {name for name in schedules_for("auto") if is_worth_trying(name, 1, 4)}
    assert tried == {"gpipe", "1f1b", "zb-h1", "zb-h2", "eager-1f1b"}
    assert {name for name in schedules_for("auto") if is_worth_trying(name, 2, 4)} == {
        "gpipe", "interleaved", "zb-v", "v-half", "dualpipe-v",
    }  # fmt: skip
    assert "zb-v" not in schedules_for("auto", tables="modulo") and schedules_for("gpipe") == ("gpipe",)


def test_a_search_is_added_where_the_others_are_fastest():
    found = ranked(chain([1.0] * 8), 2, schedules=schedules_for("auto"), per_rank=(1, 2), chunks=(4,))
    assert found.winner.step_s <= min(each.step_s for each in found.best if each.candidate.schedule != "zb-auto")


@pytest.mark.parametrize(
    ("rows", "ranks", "counts"), [(32, 4, (4, 8, 16, 32)), (12, 4, (4, 6, 12)), (7, 4, (7,)), (3, 4, (3,)), (64, 2, (2, 4, 8, 16))]
)  # fmt: skip
def test_chunks_that_leave_no_remainder_are_tried(rows, ranks, counts):
    assert chunk_counts(rows, ranks) == counts


def test_a_cut_that_more_values_cross_is_only_taken_for_more_than_they_cost():
    made = replace(chain([1.0] * 8, waits=False), crossing_s=(0.0, 0.4, 0.4, 0.4, 3.0, 0.4, 0.4, 0.4))
    assert costs_of(made, (0, 4), (0, 1), setting(2)).forward == (4.0 + 1.3, 4.0 + 1.3)
    cheap = replace(made, crossing_s=(0.0,) + (0.4,) * 7)
    assert ranked(cheap, 2, schedules=("1f1b",)).winner.begins == (0, 4)
    assert ranked(
        replace(made, crossing_s=(0.0, 0.4, 0.4, 0.4, 9.0, 0.4, 0.4, 0.4)), 2, schedules=("1f1b",)
    ).winner.begins != (0, 4)


def test_several_stages_on_one_rank_are_planned_when_the_schedule_is_left_open():
    best = ranked(chain([1.0] * 4), 1, schedules=schedules_for("auto"), per_rank=(2,)).winner
    assert (best.candidate.schedule, best.candidate.stages_per_rank, len(best.begins)) == ("1f1b", 2, 2)


def test_no_plan_of_forwards_alone_is_faster_than_its_bound():
    link = Link(latency_s=0.01, bytes_per_s=1e30, action_s=0.001)
    ranking = ranked(chain([1.0] * 6, crossing_bytes=1.0), 3, schedules=("forward",), per_rank=(1, 2), link=link)
    assert all(0.0 <= ranking.gap(each) < 2.0 for each in ranking.best)
