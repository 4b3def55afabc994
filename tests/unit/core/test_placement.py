from __future__ import annotations

from dataclasses import replace

import pytest

from piped.core.model import Cordon, Node, NodeState, Slot
from piped.core.placement import can_ever_fit, place
from tests.unit.core.build import spec


def node(name, num_slots, kind="cpu", state=NodeState.READY):
    slots = tuple(Slot(each, f"{kind}:{each}") for each in range(num_slots))
    return Node(name, name, "h", 1, state, "0", "127.0.0.1", "", slots)


def layout(placed):
    return [(each.node_name, each.slot.index) for each in placed]


def test_ranks_count_replicas_first_and_own_every_pp_ranks_th_stage():
    placed, _ = place(spec(stages=4, stages_per_rank=2, replicas=2), [node("n1", 4)], {})
    assert [(each.rank, each.replica, each.stages) for each in placed] == [
        (0, 0, (0, 2)),
        (1, 0, (1, 3)),
        (2, 1, (0, 2)),
        (3, 1, (1, 3)),
    ]


def test_the_fewest_nodes_are_taken_and_neighbours_sit_together():
    placed, _ = place(spec(stages=5), [node("a", 2), node("b", 4), node("c", 1)], {})
    assert layout(placed) == [("b", 0), ("b", 1), ("b", 2), ("b", 3), ("c", 0)]


def test_a_job_takes_the_node_that_it_fills():
    placed, _ = place(spec(stages=2), [node("a", 4), node("b", 2)], {})
    assert {name for name, _slot in layout(placed)} == {"b"}


def test_replicas_take_separate_nodes_where_they_fit_and_share_where_not():
    placed, _ = place(spec(stages=2, replicas=2), [node("a", 4), node("b", 2)], {})
    assert [name for name, _slot in layout(placed)] == ["b", "b", "a", "a"]
    placed, _ = place(spec(stages=2, replicas=2), [node("a", 3), node("b", 1)], {})
    assert [name for name, _slot in layout(placed)] == ["a", "a", "a", "b"]


def test_a_packed_job_takes_the_fewest_nodes_whatever_its_replicas():
    placed, _ = place(spec(stages=2, replicas=2, placement="pack"), [node("a", 4), node("b", 2)], {})
    assert {name for name, _slot in layout(placed)} == {"a"}


def test_it_is_all_or_nothing_and_the_reason_counts_what_there_is():
    nodes = [node("a", 2), node("b", 2)]
    assert place(spec(stages=8), nodes, {}) == (None, "needs 8 slots, the cluster has 4 (2 nodes × 2), 0 in use")
    reason = place(spec(stages=4), nodes, {("a", 0): 7})[1]
    assert reason == "needs 4 slots, the cluster has 4 (2 nodes × 2), 1 in use"
    nodes = [node("a", 4), node("b", 1), node("c", 9, state=NodeState.LOST)]
    reason = place(spec(stages=6), nodes, {})[1]
    assert reason == "needs 6 slots, the cluster has 5 (1 node × 4 + 1 node × 1), 0 in use"
    assert place(spec(stages=1), [], {})[1] == "needs 1 slot, the cluster has 0 (no ready node), 0 in use"


def test_slots_per_node_spreads_a_job():
    placed, _ = place(spec(stages=2, slots_per_node=1), [node("a", 4), node("b", 4)], {})
    assert layout(placed) == [("a", 0), ("b", 0)]
    reason = place(spec(stages=3, slots_per_node=1), [node("a", 4), node("b", 4)], {})[1]
    assert reason == "needs 3 slots with at most 1 per node, the cluster has 8 (2 nodes × 4), 0 in use"


@pytest.mark.parametrize(("device", "name"), [("cpu", "c"), ("cuda", "g"), ("auto", "g")])
def test_a_gang_takes_one_kind_of_device(device, name):
    placed, _ = place(spec(device=device), [node("c", 4), node("g", 2, "cuda")], {})
    assert {each for each, _slot in layout(placed)} == {name}


def test_auto_takes_cpus_when_the_gpus_could_never_hold_the_job():
    placed, _ = place(spec(stages=4), [node("c", 4), node("g", 2, "cuda")], {})
    assert {each.slot.kind for each in placed} == {"cpu"}


def test_a_gpu_job_does_not_move_to_cpus_while_its_node_reconnects():
    nodes = [node("c", 4), node("g", 2, "cuda", NodeState.DISCONNECTED)]
    assert place(spec(), nodes, {}) == (None, "needs 2 slots, the cluster has 0 (no ready node), 0 in use")


def test_whether_a_job_could_fit_does_not_depend_on_what_runs():
    assert can_ever_fit(spec(stages=4), [node("a", 2), node("b", 2)])
    assert not can_ever_fit(spec(stages=4), [node("a", 2), node("b", 2, state=NodeState.LOST)])


def test_a_job_for_any_device_does_not_wait_for_gpus_that_take_no_new_work():
    gpus = replace(node("g", 2, kind="cuda"), cordon=Cordon("ann", "", 1.0))
    assert layout(place(spec(stages=2), [node("a", 2), gpus], {})[0]) == [("a", 0), ("a", 1)]
    assert can_ever_fit(spec(stages=2), [node("a", 2), gpus])
