"""How much the runtime adds to a stage, as a number of calls: the same on every machine, so that it can be a test."""

import itertools

import torch.distributed as dist

from stagekit.testing import spawn
from tests.bench.sides import STAGES_PER_RANK, Bare, Ours, count_calls, tiny_stages
from tests.bench.workloads import over, wrapped_stages

CHUNKS = 16
MOST = {"1f1b": 7.5, "gpipe": 7.5, "interleaved": 6.0, "zb-v": 6.0, "zb-auto": 10.0}  # of a step's fixed cost too
MORE = {"gloo": 0.0, "shm": 5.0}  # a message is 7 calls instead of 4, and a wait that has to sleep 3


def calls_over_bare(rank):
    """Return, per transport and schedule, calls per compute action above the bare stage."""
    counts = {}
    for transport, schedule in itertools.product(MORE, MOST):
        stages = tiny_stages(2 * STAGES_PER_RANK.get(schedule, 1))
        with over(transport):
            ours = Ours.chain(stages, schedule, CHUNKS, dist.group.WORLD)
        bare = Bare(wrapped_stages(ours.run), len(stages) - 1, CHUNKS)
        for _ in range(2):
            ours.step()
            bare.step()
        counts[transport, schedule] = (count_calls(ours.step) - count_calls(bare.step)) / bare.num_actions
    return counts


def test_an_action_costs_few_calls_above_the_bare_stage():
    # torch.distributed.pipelining 2.13 adds 128 to 345, counted alike: python tests/bench/pipeline.py --only calls
    ranks = spawn(calls_over_bare, 2)
    for transport, schedule in itertools.product(MORE, MOST):
        counts, most = [rank[transport, schedule] for rank in ranks], MOST[schedule] + MORE[transport]
        assert sum(counts) / len(counts) <= most, (transport, schedule, counts)
        assert max(counts) <= 2 * most, (transport, schedule, counts)
