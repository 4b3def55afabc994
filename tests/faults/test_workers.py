"""Workers that do not want to end: a cancel always does."""

import contextlib
import os
import signal
import uuid
from pathlib import Path

import pytest

from tests.faults.jobs import at_step, job
from tests.support.cluster import Cluster, wait_until

FREEZER = Path("/sys/fs/cgroup/freezer")  # of version 1: what is frozen there does not even end by SIGKILL
GRACE_S = 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, slots=2) as cluster:
        yield cluster
        cluster.check_no_leak()


def running(cluster, name):
    """Return a job that runs for long, and its workers' pids."""
    job_id = cluster.submit(job(name, pause_s=0.05) | {"train": {"steps": 100_000}, "recovery": {"grace": GRACE_S}})
    return job_id, at_step(cluster, job_id, 2)


def test_a_job_whose_worker_is_stopped_is_cancelled_within_its_grace(cluster):
    job_id, workers = running(cluster, "stopped")
    os.kill(workers[1], signal.SIGSTOP)
    assert cluster.pipectl("cancel", job_id).returncode == 0
    cluster.wait_for(job_id, "CANCELLED", timeout_s=20)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


@contextlib.contextmanager
def frozen(pid):
    """Hold a process where no signal reaches it."""
    group = FREEZER / f"piped-test-{uuid.uuid4()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        wait_until(lambda: not (group / "cgroup.procs").read_text(), 20, "the end of what was frozen")
        group.rmdir()


if os.access(FREEZER, os.W_OK):  # nothing else makes a process that can't be killed at will

    def test_a_worker_that_nothing_kills_keeps_its_slot_but_not_its_job(cluster):
        job_id, workers = running(cluster, "frozen")
        with frozen(workers[1]):
            assert cluster.pipectl("cancel", job_id).returncode == 0
            ended = cluster.wait_for(job_id, "CANCELLED", timeout_s=30)
            assert cluster.events(job_id, "worker_unkillable")
            assert sum(node.slots_used for node in cluster.api.nodes()) >= 1
            assert "UNKILLABLE" in cluster.describe(ended.job_id)
        wait_until(lambda: not any(node.slots_used for node in cluster.api.nodes()), 20, "the release of its slot")
