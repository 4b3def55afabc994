"""One rank of two makes no progress any more: it is stopped with its neighbours, and named with what it did."""

import os
import signal
import time
from pathlib import Path

import pytest

from pipeapi.v1 import jobs_pb2
from tests.faults.jobs import at_step, check_undisturbed, job
from tests.support.cluster import Cluster, wait_until

PROGRAMS = Path(__file__).parent / "programs"
WAYS = {  # what stands still: the rank that is blamed, what is told of it, a function in its stacks
    "data": (0, "in data after step 2", "in batches"),
    "update": (0, "in step 3", "in step"),
    "hook": (1, "in hook after step 3", "in on_step"),
    "lock": (1, "said nothing", "in loss"),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, slots=6) as cluster:
        yield cluster
        cluster.check_no_leak()


@pytest.fixture(scope="module", autouse=True)
def hung(cluster):
    """Jobs that hang by themselves, beside whatever else the tests do."""
    return {how: cluster.submit(stuck(how)) for how in WAYS}


def test_a_rank_that_stops_for_two_seconds_restarts_nothing(cluster, losses):
    job_id = cluster.submit(job("short", pause_s=0.05))
    stopped_for(at_step(cluster, job_id, 3)[0], 2.0)
    check_undisturbed(cluster, job_id, losses)


def test_what_stood_still_while_the_coordinator_was_away_has_all_its_time_again(cluster, losses):
    job_id = cluster.submit(job("restarted", pause_s=0.05, recovery={"hang_timeout": 4}))
    pid = at_step(cluster, job_id, 3)[0]
    cluster.coordinator.kill()
    stopped_for(pid, 5.0, then=cluster.coordinator.start)
    check_undisturbed(cluster, job_id, losses)


@pytest.mark.parametrize("how", WAYS)
def test_the_rank_that_stands_still_is_named_with_its_section_its_waiters_and_its_stacks(cluster, hung, how):
    rank, told, function = WAYS[how]
    failure = cluster.wait_for(hung[how], "FAILED", timeout_s=60).failure
    assert (failure.reason, failure.rank) == (jobs_pb2.FAILURE_REASON_HANG, rank)
    assert told in failure.message and f"rank {1 - rank} waits for" in failure.message
    assert "not known" not in failure.message
    assert function in failure.log_tail


def stopped_for(pid, seconds, then=lambda: None):
    """Stop a process for so long, and until `then` has returned."""
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until_s, 2 * seconds, "the pause")
    then()
    os.kill(pid, signal.SIGCONT)


def stuck(how):
    return {
        "version": 1,
        "name": how.replace(" ", "-"),
        "program": "stuck:Stuck",
        "source": str(PROGRAMS),
        "params": {"how": how},
        "pipeline": {"stages": 2, "chunks": 2, "split": ["2"]},
        "resources": {"slots_per_node": 1},
        "train": {"steps": 100_000, "log_every": 1000},
        "recovery": {"hang_timeout": 4},
    }
