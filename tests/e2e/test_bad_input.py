"""What goes wrong is told: what, where, why and what to do, with the exit code that says so."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from pipeapi import jobproto, jobspec
from stagekit.describe import failure, plan_job
from stagekit.errors import StagekitError

PROGRAMS = Path(__file__).parent / "programs"


def job(name, program="broken:Fine", *, params=None, stages=2, steps=6, **more):
    return {
        "version": 1,
        "name": name,
        "program": program,
        "source": str(PROGRAMS),
        "params": params or {},
        "pipeline": {"stages": stages, "chunks": 4, **more.pop("pipeline", {})},
        "train": {"steps": steps},
        **more,
    }


def write(folder, spec):
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return str(path)


@pytest.mark.parametrize(
    ("spec", "field", "told"),
    [
        (job("a", "broken:Fina"), "program", ["broken has no Fina", "Fine"]),
        (job("a", "broken:Incomplete"), "program", ["Incomplete lacks example_inputs, loss, optimizer, batches"]),
        (job("a", params={"widht": 8}), "params.widht", ['there is no such parameter; did you mean "width"?']),
        (job("a", stages=60), "pipeline.split", ["60 stages"]),
        (job("a", pipeline={"split": ["1.2"]}), "pipeline.split", ["1.2", "1"]),
        (job("a", pipeline={"compile": "nosuch"}), "pipeline.compile", ["compile='nosuch' is no backend", "inductor"]),
    ],
    ids=["no-class", "incomplete", "params", "too-many-stages", "unknown-cut", "unknown-backend"],
)
def test_the_planner_names_the_field_that_must_change(spec, field, told, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # in this process: each of its own would import torch
    plain = jobproto.to_dict(
        jobproto.to_proto(jobspec.load_text(yaml.safe_dump(spec).encode(), "job.yaml"), environ={})
    )
    with pytest.raises(StagekitError) as caught:
        plan_job(plain, str(PROGRAMS), quick=True)
    document = failure(caught.value, plain)
    assert document["field"] == field
    for part in told:
        assert part in document["error"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (job("a", "nowhere:Program"), ["program: ", "there is no module 'nowhere'", "`source`", "job.yaml:3:10"]),
        (job("a", "broken:Branches"), ['broken.py", line', "job.yaml:3:10"]),
    ],
    ids=["no-module", "branches"],
)
def test_a_program_that_can_not_run_is_refused_before_anything_starts(cluster, tmp_path, spec, told):
    done = cluster.pipectl("submit", write(tmp_path, spec))
    assert done.returncode == 2, done.stdout + done.stderr
    for part in told:
        assert part in done.stderr
    assert done.stdout == ""
    assert cluster.pipectl("get", "jobs", "a").returncode == 3


def test_a_job_that_needs_more_slots_than_there_are_waits_and_says_why(cluster):
    job_id = cluster.submit(job("too-big", stages=8, params={"layers": 8}))
    assert cluster.state(job_id) == "QUEUED"
    text = cluster.describe(job_id)
    assert "8 slots" in text and "4" in text
    assert cluster.pipectl("cancel", job_id).returncode == 0
    assert cluster.pipectl("wait", job_id).returncode == 8


def test_a_name_that_a_live_job_has_is_refused_with_the_job_that_has_it(cluster, tmp_path):
    spec = job("twice", stages=8, params={"layers": 8})
    job_id = cluster.submit(spec)
    done = cluster.pipectl("submit", "--no-check", write(tmp_path, spec))
    assert done.returncode == 7, done.stderr
    assert job_id in done.stderr
    cluster.pipectl("cancel", job_id)
    again = cluster.submit(spec)
    cluster.pipectl("cancel", again)


def test_an_exception_in_one_rank_is_shown_as_that_ranks_and_not_its_neighbours(cluster):
    job_id = cluster.submit(job("loss-breaks", "broken:LossBreaks", stages=4))
    done = cluster.pipectl("wait", job_id)
    assert done.returncode == 1
    text = cluster.describe(job_id)
    assert "USER_ERROR: rank 3 (stages [3])" in text
    assert "ValueError: the label file is one line short" in text
    assert "step 2" in text
    assert "broken.py" in text
    assert "PeerError" not in text
    assert "recvValueWithTimeout" not in cluster.pipectl("logs", job_id).stdout  # torch's, of a store that ended


def test_a_forgotten_return_in_optimizer_is_told_instead_of_training_nothing(cluster):
    job_id = cluster.submit(job("forgets", "broken:ForgetsToReturn"))
    assert cluster.pipectl("wait", job_id).returncode == 1
    assert "optimizer() returned None; return a torch.optim.Optimizer" in cluster.describe(job_id)


def test_a_loss_that_is_not_a_number_is_a_numeric_failure(cluster):
    job_id = cluster.submit(job("explodes", "broken:Explodes"))
    assert cluster.pipectl("wait", job_id).returncode == 1
    text = cluster.describe(job_id)
    assert "NUMERIC" in text and "the loss is nan in step 1" in text


def test_a_worker_that_dies_without_a_word_is_named_with_its_signal(cluster):
    job_id = cluster.submit(job("dies", "broken:Dies", stages=4))
    assert cluster.pipectl("wait", job_id).returncode == 1
    text = cluster.describe(job_id)
    assert "SIGNALLED: rank 0 (stages [0])" in text
    assert "SIGKILL" in text or "signal 9" in text
    assert "recvValueWithTimeout" not in cluster.pipectl("logs", job_id).stdout


def test_cancelling_a_running_job_ends_it_and_frees_its_slots(cluster):
    job_id = cluster.submit(job("cancelled", stages=4, steps=100_000, params={"pause_s": 0.05}))
    cluster.wait_for(job_id, "RUNNING")
    assert cluster.pipectl("cancel", job_id).returncode == 0
    assert cluster.pipectl("wait", job_id).returncode == 8
    assert sum(node.slots_used for node in cluster.api.nodes()) == 0


def test_wait_gives_up_after_its_timeout_with_exit_124(cluster):
    job_id = cluster.submit(job("slow", stages=8, params={"layers": 8}))
    done = cluster.pipectl("wait", job_id, "--timeout", "0.5")
    assert done.returncode == 124, done.stderr
    cluster.pipectl("cancel", job_id)


def test_logs_follow_a_job_to_its_end_and_name_ranks(cluster):
    job_id = cluster.submit(job("logged", stages=2, steps=12))
    done = cluster.pipectl("logs", "-f", job_id)
    for _ in range(100):  # a job that has no workers yet has no logs
        if done.returncode == 0:
            break
        time.sleep(0.1)
        done = cluster.pipectl("logs", "-f", job_id)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("[0] ") for line in lines) and any(line.startswith("[1] ") for line in lines)
    assert '"step": 10' in done.stdout and "weights_digest" in done.stdout
    only = cluster.pipectl("logs", job_id, "--rank", "1")
    assert only.stdout and "[0]" not in only.stdout
    assert cluster.pipectl("logs", job_id, "--rank", "7").returncode == 3


def test_a_second_coordinator_on_the_same_state_refuses_and_names_the_first(cluster, tmp_path):

    command = [sys.executable, "-m", "piped", "coordinator", "--state-dir", str(cluster.coordinator.folder)]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--health", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert str(cluster.coordinator.process.pid) in done.stderr + done.stdout
