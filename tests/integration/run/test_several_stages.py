"""Several stages per rank, also unequal numbers: the bits of a plain loop, and as much held as the plan says, action by action."""

import pytest
import torch
from torch import nn

from stagekit.plan.actions import Op
from stagekit.plan.plan import make_plan
from stagekit.plan.schedules.registry import NAMES
from stagekit.run.lane import RunOptions
from stagekit.run.runtime import Run
from stagekit.testing import ChainSource, spawn
from tests.integration.run.scenarios import WIDTH, batch, gradients, mean_square, modules, plain_loop

CHUNKS, ROWS = 6, 12  # equal chunks: one size of buffers
TWO_EACH = ("gpipe", "interleaved", "bfs", "zb-v", "v-half", "dualpipe-v", "forward", "zb-auto")
BLOCKS = ((2, 1), (1, 3))
UNEQUAL = ("gpipe", "bfs", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "forward", "zb-auto")
CASES = [*((name, 2) for name in TWO_EACH), *((name, counts) for name in UNEQUAL for counts in BLOCKS)]
OTHER_ORDER = ("dualpipe-v",)


def stages_of(per_rank):
    return 2 * per_rank if isinstance(per_rank, int) else sum(per_rank)


def watched(rank, schedule, per_rank):
    """Take two steps, the second one action by action; return what was held at most, and what should have been."""
    count = stages_of(per_rank)
    source = ChainSource(modules(count), WIDTH, ROWS // CHUNKS)
    plan = make_plan(source.spec, schedule=schedule, num_chunks=CHUNKS, stages_per_rank=per_rank)
    run = Run(source, plan, RunOptions(mean_square if plan.trains else None, None, 0), torch.device("cpu"), None)
    x, target = batch(ROWS)
    target = target if plan.trains else None
    run.step(x, target=target)
    run.zero_grad()
    run.begin_step(x, target=target)
    actions, most = run.executor.recorder.actions, 0
    for index in range(len(actions)):
        run.executor.perform(index)
        most = max(most, sum(runner.num_chunks_held for runner in run._runners.values()))
    result = run.end_step()
    run.close()
    return {
        "held": (most, plan.timeline.peak_chunks[rank] if plan.trains else 0),
        "buffers": (run.executor.pool.num_buffers, most_buffers(actions)),
        "stages": run.own_stages,
        "grads": gradients(run) if plan.trains else {},
        "output": result.output,
    }


def most_buffers(actions):
    """Return the most receive buffers in use at once: they return at the end of their chunk in their stage."""
    trains = any(action.op in (Op.B, Op.W) for action in actions)
    held, most = {}, 0
    for action in actions:
        if action.op in (Op.RECV_F, Op.RECV_B):
            held[action.stage, action.chunk] = held.get((action.stage, action.chunk), 0) + 1
            most = max(most, sum(held.values()))
        elif action.op in (Op.B, Op.W) or (action.op is Op.F and not trains):
            held.pop((action.stage, action.chunk), None)
    return most


def everything(rank):
    return {case: watched(rank, *case) for case in CASES}


@pytest.fixture(scope="module")
def ranks():
    return spawn(everything, 2)


def test_every_schedule_that_runs_several_stages_is_here():
    assert {name for name, _ in CASES} == set(NAMES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_activations_held_at_once_are_those_the_plan_predicts(ranks, case):
    for rank in ranks:
        held, planned = rank[case]["held"]
        assert held == planned


@pytest.mark.parametrize("case", CASES, ids=str)
def test_receive_buffers_are_those_the_list_holds_at_once(ranks, case):
    for rank in ranks:
        buffers, listed = rank[case]["buffers"]
        assert buffers == listed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_with_several_stages_give_what_the_chain_alone_gives(ranks, case):
    schedule, per_rank = case
    model = nn.Sequential(*modules(stages_of(per_rank)))
    x, target = batch(ROWS)
    if schedule == "forward":
        with torch.no_grad():
            expected = torch.cat([model(part) for part in x.tensor_split(CHUNKS)])
        (output,) = [rank[case]["output"] for rank in ranks if rank[case]["output"] is not None]
        assert torch.equal(output, expected)
        return
    _, expected = plain_loop(model, x, target, CHUNKS)
    got = {name: gradient for rank in ranks for name, gradient in rank[case]["grads"].items()}
    for name, gradient in expected.items():
        if schedule in OTHER_ORDER:
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(got[name], gradient), name


@pytest.mark.parametrize("counts", BLOCKS)
def test_blocks_lie_where_the_caller_says(ranks, counts):
    for schedule in UNEQUAL:
        assert [len(rank[schedule, counts]["stages"]) for rank in ranks] == list(counts)
