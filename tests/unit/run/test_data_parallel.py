"""Gradients over replicas: which bucket's all-reduce is launched when, on a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagekit.errors import UserError
from stagekit.plan.contract import Bucket, StageSpec
from stagekit.run.data_parallel import BucketReducer, GradientSums

NAMES = ("d", "c", "b", "a")  # buckets come in the order in which a backward makes gradients


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def parameters() -> dict[str, nn.Parameter]:
    made = {name: nn.Parameter(torch.ones(2)) for name in NAMES}
    for parameter in made.values():
        parameter.grad = torch.ones(2)
    return made


def reducer(own: dict[str, nn.Parameter], group: dist.ProcessGroup) -> BucketReducer:
    buckets = (Bucket(16, ("d", "c")), Bucket(8, ("b",)), Bucket(8, ("a",)))
    return BucketReducer(StageSpec(0, "0", "0", (), ("v",), (), (), buckets), own, group)


def test_weight_gradients_that_come_late_launch_their_buckets_in_order(group: dist.ProcessGroup) -> None:
    own = parameters()
    made = reducer(own, group)
    ready = made.arm_for([own["c"], own["a"]])
    assert made.num_launched == 0  # the first waits for c; the second must not overtake it
    ready(own["a"])
    assert made.num_launched == 0
    ready(own["c"])
    assert made.num_launched == 3
    made.launch_rest()
    made.finish()
    assert all(torch.equal(parameter.grad, torch.ones(2)) for parameter in own.values() if parameter.grad is not None)


def test_buckets_that_wait_for_nothing_are_launched_before_the_weight_half_begins(group: dist.ProcessGroup) -> None:
    own = parameters()
    made = reducer(own, group)
    ready = made.arm_for([own["b"]])
    assert made.num_launched == 1
    ready(own["b"])
    assert made.num_launched == 3
    made.launch_rest()
    made.finish()


def step(sums: GradientSums, own: dict[str, nn.Parameter], gradient: float) -> None:
    """One step whose backward makes that gradient."""
    sums.begin()
    for parameter in own.values():
        made = torch.full((2,), gradient)
        parameter.grad = made if parameter.grad is None else parameter.grad + made
    sums.arm(0)
    sums.launch_rest(0)
    sums.finish(0)
    sums.end()


def values(own: dict[str, nn.Parameter]) -> set[tuple[float, ...]]:
    return {tuple(p.grad.tolist()) for p in own.values() if p.grad is not None}


def test_gradients_of_a_step_without_sync_are_summed_with_the_next_ones(group: dist.ProcessGroup) -> None:
    own = parameters()
    made = reducer(own, group)
    sums = GradientSums({0: made}, {}, list(own.items()))
    for parameter in own.values():
        parameter.grad = None
    with sums.synchronised(False):
        step(sums, own, 1.0)
        step(sums, own, 2.0)
    assert (made.num_launched, values(own)) == (0, {(3.0, 3.0)})
    step(sums, own, 4.0)
    assert (made.num_launched, values(own)) == (3, {(7.0, 7.0)})
    step(sums, own, 8.0)  # adds to a sum, which is not summed again
    assert values(own) == {(15.0, 15.0)}


def test_a_step_without_sync_on_top_of_summed_gradients_is_refused(group: dist.ProcessGroup) -> None:
    own = parameters()
    sums = GradientSums({0: reducer(own, group)}, {}, list(own.items()))
    with sums.synchronised(False), pytest.raises(UserError, match="zero the gradients first"):
        step(sums, own, 1.0)
    for parameter in own.values():
        assert parameter.grad is not None
        parameter.grad.zero_()
    with sums.synchronised(False):
        step(sums, own, 1.0)
    assert values(own) == {(1.0, 1.0)}
