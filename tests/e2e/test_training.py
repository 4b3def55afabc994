"""Jobs of 4 stages on 2 nodes give what a plain loop in one process gives: every loss and the final weights."""

import pytest
import torch

from stagekit.examples import digits, gpt, gpt2
from stagekit.run import checkpoint
from tests.support import reference

SEED = 11
GPT = {"layers": 4, "width": 32, "heads": 2, "sequence": 32, "batch": 8}
CASES = {
    "gpt": (gpt, GPT, {"stages": 4, "chunks": 4, "buckets": {"cap": "16KiB", "first": "4KiB"}}),
    "digits": (digits, {"width": 8, "batch": 32}, {"stages": 4, "chunks": 4}),
    "gpt2": (gpt2, {"layers": 4, "width": 32, "heads": 2, "sequence": 32, "batch": 8}, {"stages": 4, "chunks": 2}),
}


def job(name, folder, steps, *, schedule="1f1b", **pipeline):
    module, params, defaults = CASES[name]
    return {
        "version": 1,
        "name": f"{name}-{schedule}",
        "program": f"{module.__name__}:Program",
        "params": params,
        "pipeline": {"schedule": schedule, **defaults, **pipeline},
        "train": {"steps": steps, "seed": SEED},
        "checkpoint": {"dir": str(folder / f"{name}-{schedule}")},
    }


def saved(folder):
    (only,) = [path for path in folder.iterdir() if path.name.startswith("step_")]
    return checkpoint.load(only)


@pytest.fixture(scope="module")
def plain():
    """Losses and weights of the plain loop, by example."""

    def run(name, steps):
        module, params, pipeline = CASES[name]
        return reference.train(module.Program(**params), steps=steps, chunks=pipeline["chunks"], seed=SEED)

    return run


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_gpt_in_4_stages_on_2_nodes_equals_the_plain_loop_bit_for_bit(cluster, tmp_path, plain, schedule):
    spec = job("gpt", tmp_path, 6, schedule=schedule)
    ended = cluster.run(spec)
    losses, weights = plain("gpt", 6)
    assert cluster.losses(ended.job_id) == losses
    state = saved(tmp_path / f"gpt-{schedule}")
    assert state.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], state[name])] == []
    assert {worker.node_name for worker in ended.workers} == {"node0", "node1"}
    assert ended.plan.bit_equal == "yes"


def test_the_gpt_under_zero_bubble_in_4_stages_on_2_ranks_equals_the_plain_loop_bit_for_bit(cluster, tmp_path, plain):
    ended = cluster.run(job("gpt", tmp_path, 6, schedule="zb-v", stages_per_rank=2))
    losses, weights = plain("gpt", 6)
    assert cluster.losses(ended.job_id) == losses
    state = saved(tmp_path / "gpt-zb-v")
    assert state.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], state[name])] == []
    assert ended.plan.bit_equal == "yes"
    assert [list(worker.stages) for worker in ended.workers] == [[0, 3], [1, 2]]


def test_a_convnet_with_batchnorm_equals_the_plain_loop_bit_for_bit(cluster, tmp_path, plain):
    ended = cluster.run(job("digits", tmp_path, 6))
    losses, weights = plain("digits", 6)
    assert cluster.losses(ended.job_id) == losses
    state = saved(tmp_path / "digits-1f1b")
    assert [name for name in weights if not torch.equal(weights[name], state[name])] == []


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("zb-v", 2)], ids=["1f1b", "both ends on one rank"])
def test_a_transformers_model_with_tied_weights_equals_the_plain_loop(cluster, tmp_path, plain, schedule, per_rank):
    ended = cluster.run(job("gpt2", tmp_path, 6, schedule=schedule, stages_per_rank=per_rank))
    losses, weights = plain("gpt2", 6)
    assert cluster.losses(ended.job_id) == pytest.approx(losses, rel=1e-6)
    state = saved(tmp_path / f"gpt2-{schedule}")
    assert state.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-6, atol=1e-6, msg=name)
    tied = state["transformer.wte.weight"], state["lm_head.weight"]
    assert torch.equal(*tied)
    assert ended.plan.bit_equal.startswith("no (transformer.wte.weight is tied")


def test_every_worker_holds_only_its_own_stage(cluster, tmp_path):
    ended = cluster.run(job("gpt", tmp_path, 1, schedule="gpipe") | {"name": "gpt-shares"})
    names = [{p for bucket in stage.buckets for p in bucket.parameters} for stage in ended.plan.stages]
    assert all(names)
    assert sum(len(own) for own in names) == len(set.union(*names)), "stages share a parameter"
    shards = sorted((tmp_path / "gpt-gpipe").glob("step_*/rank_*.safetensors"))
    assert len(shards) == 4
    held = [set(checkpoint.load_file(shard)) for shard in shards]
    assert held == names
