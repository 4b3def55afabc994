"""2 stages × 2 replicas on 2 nodes, every stage a chain of compiled buckets whose gradients are reduced as they come."""

import pytest
import torch

from stagekit.examples import gpt
from stagekit.run import checkpoint
from tests.support import reference

SEED, STEPS, CHUNKS = 5, 4, 2
PARAMS = {"layers": 4, "width": 32, "heads": 2, "sequence": 32, "batch": 8}


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    spec = {
        "version": 1,
        "name": "replicas",
        "program": "stagekit.examples.gpt:Program",
        "params": PARAMS,
        "pipeline": {
            "stages": 2,
            "replicas": 2,
            "chunks": CHUNKS,
            "schedule": "1f1b",
            "buckets": {"cap": "24KiB", "first": "8KiB"},
            "compile": "inductor",
        },
        "train": {"steps": STEPS, "seed": SEED},
        "checkpoint": {"dir": str(folder / "saved")},
        "observe": {"trace_steps": [2]},
    }
    job = cluster.run(spec, timeout_s=420)
    return job, cluster.records(job.job_id, "TRACE"), cluster.losses(job.job_id), folder / "saved"


def test_every_stage_is_a_chain_of_at_least_3_compiled_buckets_that_describe_lists(cluster, ended):
    job, *_ = ended
    for stage in job.plan.stages:
        assert len(stage.buckets) >= 3
        assert stage.compile == "inductor"
    text = cluster.describe(job.job_id)
    assert "BUCKET" in text and "head.weight" in text
    assert text.count("\n1      ") >= 3


def test_replicas_of_a_stage_run_on_different_nodes(ended):
    job, *_ = ended
    nodes = {(worker.stages[0], worker.replica): worker.node_name for worker in job.workers}
    assert nodes[0, 0] != nodes[0, 1]
    assert nodes[1, 0] != nodes[1, 1]


def test_the_first_all_reduce_starts_before_the_stages_last_backward_ends(ended):
    _, trace, *_ = ended
    for rank in range(4):
        mine = [event for event in trace if event["rank"] == rank]
        last_backward = max(event["end_ns"] for event in mine if event["op"] == "B")
        reduces = [event for event in mine if event["op"] == "ALL_REDUCE"]
        assert len(reduces) >= 3, f"rank {rank}"
        assert min(event["start_ns"] for event in reduces) < last_backward, f"rank {rank}"


def test_losses_and_weights_equal_the_plain_loop_over_both_replicas_data(ended):
    _, _, losses, folder = ended
    expected, weights = reference.train(gpt.Program(**PARAMS), steps=STEPS, chunks=CHUNKS, seed=SEED, replicas=2)
    assert losses == pytest.approx(expected, rel=1e-5)
    (step,) = folder.glob("step_*")
    for name, value in checkpoint.load(step).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-4, msg=name)


def test_replicas_stay_bit_equal(cluster, ended):
    job, *_ = ended
    digests = {}
    for worker in job.workers:
        done = cluster.pipectl("logs", job.job_id, "--rank", str(worker.rank))
        (line,) = [line for line in done.stdout.splitlines() if "weights_digest" in line]
        digests.setdefault(worker.stages[0], set()).add(line.split('"digest": "')[1].split('"')[0])
    assert all(len(found) == 1 for found in digests.values()), digests
