"""Schedules and tables of stages of the user's own: a CSV file beside the job file, ranks with unequal numbers of stages."""

import pytest
import torch
import yaml

from stagekit.examples import gpt
from stagekit.plan.actions import to_csv
from stagekit.plan.schedules.registry import block_placement, compute_order
from stagekit.run import checkpoint
from tests.support import reference

SEED, STEPS = 3, 3
SIZES = {"layers": 4, "width": 16, "heads": 2, "sequence": 16, "batch": 8}


def job(name, folder, **pipeline):
    return {
        "version": 1,
        "name": name,
        "program": "stagekit.examples.gpt:Program",
        "params": SIZES,
        "pipeline": {"chunks": 4, **pipeline},
        "train": {"steps": STEPS, "seed": SEED},
        "checkpoint": {"dir": str(folder / "saved")},
    }


@pytest.fixture(scope="module")
def plain():
    return reference.train(gpt.Program(**SIZES), steps=STEPS, chunks=4, seed=SEED)


def assert_equal_to(plain, cluster, ended, folder):
    losses, weights = plain
    assert cluster.losses(ended.job_id) == losses
    (only,) = (folder / "saved").glob("step_*")
    state = checkpoint.load(only)
    assert [name for name in weights if not torch.equal(weights[name], state[name])] == []


def test_a_schedule_file_goes_along_with_the_job_to_every_node(cluster, tmp_path, plain):
    table = block_placement((1, 2, 1))  # on 3 ranks of 2 nodes
    lists = compute_order("zb-auto", table, 3, 4)
    (tmp_path / "mine.csv").write_text(to_csv(lists))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("own", tmp_path, stages=4, schedule="./mine.csv")))
    planned = cluster.pipectl("plan", str(tmp_path / "job.yaml"))
    assert "4 stages on 3 ranks × 1 replicas, mine.csv" in planned.stdout
    done = cluster.pipectl("submit", str(tmp_path / "job.yaml"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.csv").unlink()  # nobody needs it any more
    ended = cluster.wait_for(done.stdout.split()[-1], "SUCCEEDED")
    assert [list(worker.stages) for worker in ended.workers] == [[0], [1, 2], [3]]
    assert {worker.node_name for worker in ended.workers} == {"node0", "node1"}
    assert ended.plan.schedule == "mine.csv"
    assert_equal_to(plain, cluster, ended, tmp_path)


def test_ranks_hold_the_numbers_of_stages_that_the_job_says(cluster, tmp_path, plain):
    ended = cluster.run(job("blocks", tmp_path, stages=4, stages_per_rank=[3, 1], schedule="gpipe"))
    assert [list(worker.stages) for worker in ended.workers] == [[0, 1, 2], [3]]
    assert_equal_to(plain, cluster, ended, tmp_path)


BAD = {
    "a deadlock": ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", ["deadlock:", "waits for", "rank 0", "→"]),
    "a missing backward": ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", ["1B1 is missing", "rank 1"]),
    "a misspelt action": ("0F0,0F1,0B0,0B1\n1F0,1X0\n", ['rank 1, cell 1: "1X0" is no action']),
    "other chunks": ("0F0,0B0\n1F0,1B0\n", ["pipeline.chunks: is 2, but the schedule file has 1; write chunks: 1"]),
    "an empty file": ("", ["holds no action"]),
}


CASES = [("plan", "a deadlock"), ("submit", "a deadlock"), *(("validate", name) for name in BAD)]


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_bad_schedule_file_is_told_with_its_grid_before_anything_starts(cluster, tmp_path, command, name):
    text, told = BAD[name]
    (tmp_path / "mine.csv").write_text(text)
    spec = job("bad", tmp_path, stages=2, chunks=2, schedule="mine.csv")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    done = cluster.pipectl(command, str(tmp_path / "job.yaml"))
    assert done.returncode == 2
    for part in told:
        assert part in done.stderr, done.stderr
    assert "job.yaml" in done.stderr


def test_a_schedule_file_that_is_not_there_is_told_with_its_path(cluster, tmp_path):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("none", tmp_path, stages=2, schedule="mine.csv")))
    done = cluster.pipectl("validate", str(tmp_path / "job.yaml"))
    assert done.returncode == 2
    assert f"pipeline.schedule: can't read {tmp_path / 'mine.csv'}: No such file" in done.stderr
