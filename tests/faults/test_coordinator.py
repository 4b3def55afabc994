"""SIGKILL of the coordinator in each state of a job; started again on the same state and port, the job is undisturbed.

Bound: it serves and has its nodes back before a lease would have ended; the job neither restarts nor loses a step.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from pipectl.errors import CommandError
from tests.faults.jobs import STEPS, at_step, check_undisturbed, job, pids
from tests.support.cluster import Cluster, wait_until

LEASE_S = 4.0


def test_killed_while_a_job_is_queued_it_keeps_the_job_and_its_place(tmp_path, losses):
    with Cluster(tmp_path, nodes=1, slots=1) as cluster:
        job_id = cluster.submit(job("queued"))
        assert cluster.state(job_id) == "QUEUED"
        cluster.coordinator.kill()
        cluster.coordinator.start()
        assert cluster.state(job_id) == "QUEUED"
        cluster.add_node(slots=1)
        check_undisturbed(cluster, job_id, losses)
        cluster.check_no_leak()


def test_killed_as_soon_as_a_job_starts_it_starts_every_worker_once(cluster, losses):
    job_id = cluster.submit(job("starting"))
    cluster.coordinator.kill()
    cluster.coordinator.start()
    assert cluster.state(job_id) == "STARTING"
    check_undisturbed(cluster, job_id, losses)


def test_killed_when_half_of_the_workers_are_spawned_it_starts_the_rest_and_none_twice(cluster, losses):
    with half_spawned(cluster, job("spawning", resources={"slots_per_node": 1})) as job_id:
        cluster.coordinator.kill()
        assert sorted(path.parent.name for path in files(cluster, job_id, "started")) == ["0"]
    cluster.coordinator.start()
    assert cluster.state(job_id) == "STARTING"
    check_undisturbed(cluster, job_id, losses)


@pytest.mark.parametrize(("down_s", "pause_s"), [(0.0, 0.1), (2 * LEASE_S, 0.3)])
def test_killed_while_a_job_runs_it_comes_back_and_the_job_has_not_noticed(cluster, losses, down_s, pause_s):
    job_id = cluster.submit(job(f"running-{down_s:.0f}", pause_s=pause_s))
    before = at_step(cluster, job_id, 3)
    command = [sys.executable, "-m", "pipectl", "--coordinator", cluster.address, "wait", job_id]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as wait:
        line = wait.stderr.readline()
        assert "RUNNING" in line
        cluster.coordinator.kill()
        steps = num_steps(cluster, job_id) + max(1, round(down_s / pause_s))  # a step takes `pause_s` and a little
        wait_until(lambda: num_steps(cluster, job_id) >= steps, 30, "steps while it is down")
        cluster.coordinator.start()
        assert cluster.state(job_id) == "RUNNING"
        assert wait.wait(timeout=60) == 0, wait.stderr.read()
    check_undisturbed(cluster, job_id, losses)
    assert pids(cluster, job_id) == before


def test_a_job_that_ends_while_it_is_down_has_succeeded_when_it_is_back(cluster, losses):
    job_id = cluster.submit(job("ends", pause_s=0.1))
    at_step(cluster, job_id, 3)
    cluster.coordinator.kill()
    wait_until(lambda: len(files(cluster, job_id, "exit.json")) == 2, 60, "the end of both workers")
    cluster.coordinator.start()
    ended = check_undisturbed(cluster, job_id, losses)
    assert (ended.progress.step, ended.progress.loss) == (STEPS, losses[-1])
    assert f"{STEPS}/{STEPS}  {losses[-1]:.4f}" in cluster.pipectl("get", "jobs", job_id).stdout


def files(cluster, job_id, name):
    """Return a file of every rank, on whichever node it is."""
    return [file for folder in cluster.attempt_dirs(job_id) for file in folder.glob(f"ranks/*/{name}")]


def num_steps(cluster, job_id):
    """Return the steps that the last rank has recorded on its node: known without a coordinator."""
    return sum(len(file.read_text().splitlines()) for file in files(cluster, job_id, "steps.jsonl"))


@contextlib.contextmanager
def half_spawned(cluster, spec):
    """Submit; inside, node0 has started its rank while node1 has prepared, but its shim is halted and starts none."""
    _, halted = cluster.nodes
    command = [sys.executable, "-m", "pipectl", "--coordinator", cluster.address]
    with subprocess.Popen([*command, "submit", "--no-check", cluster.write(spec)], stdout=subprocess.DEVNULL):
        job_id = wait_until(lambda: job_named(cluster, spec["name"]), 30, "the submission", every_s=0.002)

        def folder(*names):
            """Return node1's directory of the attempt once it holds these files."""
            found = [path for path in cluster.attempt_dirs(job_id) if halted.folder in path.parents]
            return found[0] if found and all((found[0] / name).exists() for name in names) else None

        wait_until(lambda: folder("shim.log"), 10, "node1's shim is launched", every_s=0.002)
        cluster.coordinator.process.send_signal(signal.SIGSTOP)  # it hears of no preparation, so nothing is committed
        try:
            wait_until(lambda: has_prepared(halted, job_id), 10, "node1's preparation", every_s=0.01)
            shim = json.loads((folder("shim.json") / "shim.json").read_text())["pid"]
            os.kill(shim, signal.SIGSTOP)
        finally:
            cluster.coordinator.process.send_signal(signal.SIGCONT)
    try:
        wait_until(lambda: files(cluster, job_id, "started"), 10, "node0's worker")
        yield job_id
    finally:
        os.kill(shim, signal.SIGCONT)


def has_prepared(node, job_id):
    return any('"prepared"' in line and job_id in line for line in node.log().splitlines())


def job_named(cluster, name):
    try:
        return cluster.api.get(name).job_id
    except CommandError:
        return None
