"""How much the runtime adds to a stage, as a number of calls: the same on every machine, so that it can be a test."""

import torch.distributed as dist

from stagekit.testing import spawn
from tests.bench.sides import Ours, count_calls, tiny_stages

CHUNKS = 16


def calls_over_bare(rank):
    """Return, per schedule, calls per compute action above the bare stage."""
    counts = {}
    for schedule in ("1f1b", "gpipe"):
        ours = Ours.chain(tiny_stages(2), schedule, CHUNKS, dist.group.WORLD)
        for _ in range(2):
            ours.step()
            ours.bare.step()
        counts[schedule] = (count_calls(ours.step) - count_calls(ours.bare.step)) / (2 * CHUNKS)
    return counts


def test_an_action_costs_few_calls_above_the_bare_stage():
    # torch.distributed.pipelining 2.13 adds 128 (1f1b) and 157 (gpipe), counted alike: python tests/bench/pipeline.py
    ranks = spawn(calls_over_bare, 2)
    for schedule in ("1f1b", "gpipe"):
        counts = [rank[schedule] for rank in ranks]
        assert sum(counts) / len(counts) <= 8.0, counts  # of a step's fixed cost, 16 chunks carry twice what 32 do
        assert max(counts) <= 16.0, counts
