"""SIGKILL of a node daemon, a shim or one worker: what must go on goes on, what must end ends and names the right one.

Bounds: a daemon's death disturbs no job; a shim's workers are gone with it; the verdict names the rank that was killed.
"""

import json
import os
import signal

from pipeapi.v1 import jobs_pb2
from tests.faults.jobs import at_step, check_undisturbed, job, pids
from tests.support.cluster import wait_for_no_process_of


def test_a_killed_daemon_comes_back_to_its_workers_and_the_job_has_not_noticed(cluster, losses):
    job_id = cluster.submit(job("daemon", pause_s=0.15))
    before = at_step(cluster, job_id, 3)
    node = node_of(cluster, job_id, 0)
    node.kill()
    node.start()
    check_undisturbed(cluster, job_id, losses)
    assert pids(cluster, job_id) == before


def test_a_killed_shim_takes_its_workers_along_and_the_job_starts_anew_with_the_same_losses(cluster, losses):
    job_id = cluster.submit(job("shim", stages=3, pause_s=0.15))
    at_step(cluster, job_id, 3)
    alone = next(worker for worker in cluster.api.get(job_id).workers if worker.rank == 2)
    (folder,) = [path for path in cluster.attempt_dirs(job_id) if path.parents[1].name == alone.node_name]
    marker = f"PIPED_SHIM={json.loads((folder / 'attempt.json').read_text())['marker']}"
    os.kill(json.loads((folder / "shim.json").read_text())["pid"], signal.SIGKILL)
    assert not wait_for_no_process_of(None, {marker}, timeout_s=2.0)
    ended = cluster.wait_for(job_id, "SUCCEEDED")
    assert (ended.attempt, ended.restarts_used, cluster.losses(job_id)) == (2, 0, losses)
    request = jobs_pb2.FailureReportRequest(job=job_id, attempt=1)
    first = cluster.api.call(cluster.api.jobs.FailureReport, request).failure
    assert (first.reason, first.rank, first.node_name) == (jobs_pb2.FAILURE_REASON_NODE_LOST, 2, alone.node_name)
    assert "shim" in first.message


def test_a_killed_worker_of_a_middle_stage_is_blamed_and_its_neighbours_are_not(cluster, losses):
    other_id = cluster.submit(job("other", stages=1, pause_s=0.3))
    job_id = cluster.submit(job("middle", stages=3, pause_s=0.15))
    killed = at_step(cluster, job_id, 3)[1]
    os.kill(killed, signal.SIGKILL)
    ended = cluster.wait_for(job_id, "FAILED")
    failure = ended.failure
    assert (failure.reason, failure.rank, list(failure.stages)) == (jobs_pb2.FAILURE_REASON_SIGNALLED, 1, [1])
    assert "signal 9" in failure.message
    text = cluster.describe(job_id)
    verdict, _, parts = text.partition("\nAttempt 1 failed")
    assert "SIGNALLED: rank 1 (stages [1]) on" in verdict and "PeerError" not in verdict
    assert "ROOT" in parts  # its neighbours are victims, or were stopped before they could tell
    check_undisturbed(cluster, other_id, losses)  # side by side on the same nodes: left alone


def node_of(cluster, job_id, rank):
    worker = next(each for each in cluster.api.get(job_id).workers if each.rank == rank)
    return next(node for node in cluster.nodes if node.name == worker.node_name)
