"""Who a node is: copies of it, the same one after a reboot, one whose line breaks all the time, two clusters on one host."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import uuid

import pytest

from pipeapi.v1 import cluster_pb2
from tests.faults.control.scripts import (
    acts,
    attempt_dir,
    check_invariants,
    first_failure,
    is_alive,
    let_go,
    node_named,
    running,
)
from tests.support.cluster import Cluster, Daemon, processes_of, wait_until
from tests.support.relay import relay_to

READY = cluster_pb2.NODE_STATE_READY


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory):
    """Three nodes of two slots: a plain one, one behind a relay, one whose boot clock is an hour ahead."""
    with Cluster(tmp_path_factory.mktemp("identity"), nodes=0) as cluster, relay_to(cluster.address) as relay:
        cluster.add_node(2, "--label", "kind=plain")
        cluster.add_node(2, "--label", "kind=relayed", "--coordinator", relay.address)
        cluster.add_node(2, "--label", "kind=ahead", within=["unshare", "--time", "--boottime", "3600"])
        wait_until(lambda: len(cluster.api.nodes()) == 3, 20, "every node's registration")
        yield cluster, relay


@pytest.fixture
def cluster(running_cluster):
    yield running_cluster[0]
    check_invariants(running_cluster[0])


@pytest.fixture
def relay(running_cluster):
    return running_cluster[1]


def on(kind):
    """Return the part of a job file that asks for one of the three nodes."""
    return {"resources": {"node_selector": {"kind": kind}}}


def test_a_cloned_node_is_refused_naming_the_holder_and_the_first_keeps_its_work(cluster, tmp_path):
    job_id = cluster.submit(acts(cluster, "kept", "until_file", **on("plain")))
    workers = running(cluster, job_id)
    before = node_named(cluster, "node0")
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copy(cluster.nodes[0].folder / "node_id", clone)
    flags = ["--coordinator", cluster.address, "--metrics", "127.0.0.1:0", "--slots", "2"]
    second = Daemon(tmp_path, "clone", ["node", "--name", "clone", *flags])
    try:
        wait_until(lambda: "session_ended" in second.log(), 20, "the refusal")
        holder = f"node id {before.node_id} is held by a live node 'node0' on another host"
        assert holder in second.log() and "copied state directory" in second.log()
    finally:
        second.kill(signal.SIGTERM)
    after = node_named(cluster, "node0")
    assert (after.incarnation, after.state) == (before.incarnation, before.state)
    assert running(cluster, job_id) == workers and is_alive(*workers[0])
    let_go(cluster, job_id)
    assert cluster.wait_for(job_id, "SUCCEEDED").attempt == 1


def test_a_node_that_rebooted_gets_a_new_incarnation_and_the_ranks_that_it_had_are_lost(cluster, tmp_path):
    boot = tmp_path / "boot_id"
    boot.write_text(f"{uuid.uuid4()}\n")
    job_id = cluster.submit(acts(cluster, "rebooted", "until_file", **on("plain")))
    running(cluster, job_id)
    node = cluster.nodes[0]
    node.kill()
    for pid in processes_of(None, cluster.markers_on("node0")):  # a reboot ends everything
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    mounted = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
    node.within = ["unshare", "--mount", "sh", "-c", mounted, str(boot)]
    node.start()
    wait_until(lambda: node_named(cluster, "node0").incarnation == 2, 20, "the second incarnation")
    assert first_failure(cluster, job_id)[:2] == ("node_lost", "node0")
    again = cluster.submit(acts(cluster, "after-reboot", "done", **on("plain")))
    cluster.wait_for(again, "SUCCEEDED")


def test_a_node_whose_line_breaks_twenty_times_keeps_its_work(cluster, relay):
    job_id = cluster.submit(acts(cluster, "flapping", "until_file", ranks=2, **on("relayed")))
    workers = running(cluster, job_id)
    for _ in range(20):  # most before a session stands: the lease may end
        wait_until(lambda: relay.num_connections > 0, 20, "a connection", every_s=0.01)
        relay.cut()
    wait_until(lambda: node_named(cluster, "node1").state == READY, 20, "a session")
    assert running(cluster, job_id) == workers and all(is_alive(*each) for each in workers.values())
    let_go(cluster, job_id)
    assert cluster.wait_for(job_id, "SUCCEEDED").attempt == 1
    assert len(cluster.events(job_id, "worker_spawned")) == 2


def test_two_clusters_on_one_host_leave_each_others_processes_alone(cluster, tmp_path):
    (tmp_path / "other").mkdir()
    with Cluster(tmp_path / "other", nodes=1, slots=2) as other:
        here = cluster.submit(acts(cluster, "here", "until_file", **on("plain")))
        there = other.submit(acts(other, "there", "until_file"))
        running(cluster, here)
        theirs = running(other, there)
        cluster.nodes[0].kill()
        os.kill(json.loads((attempt_dir(cluster, here) / "shim.json").read_text())["pid"], signal.SIGKILL)
        cluster.nodes[0].start()  # sweeps what its dead shim left
        assert first_failure(cluster, here)[:2] == ("node_lost", "node0")
        assert is_alive(*theirs[0]) and other.state(there) == "RUNNING"
        let_go(other, there)
        assert other.wait_for(there, "SUCCEEDED").attempt == 1
        check_invariants(other)


def test_a_process_that_got_the_pid_of_a_dead_shim_or_worker_is_never_touched(cluster):
    job_id = cluster.submit(acts(cluster, "recycled", "wait", **on("plain")))
    running(cluster, job_id)
    node, folder = cluster.nodes[0], attempt_dir(cluster, job_id)
    node.kill()
    shim = json.loads((folder / "shim.json").read_text())
    os.kill(shim["pid"], signal.SIGKILL)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as bystander:
        try:
            shim["pid"] = bystander.pid  # as the kernel may give it out again
            (folder / "shim.json").write_text(json.dumps(shim))
            node.start()
            assert first_failure(cluster, job_id)[:2] == ("node_lost", "node0")
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_node_whose_boot_clock_is_an_hour_ahead_keeps_its_lease(cluster):
    job_id = cluster.submit(acts(cluster, "ahead", "until_file", **on("ahead")))
    running(cluster, job_id)
    before = cluster.api.get(job_id).progress.step
    wait_until(lambda: cluster.api.get(job_id).progress.step > before + 100, 30, "5 s of steps: more than a lease")
    node = node_named(cluster, "node2")
    assert (node.state, node.incarnation) == (READY, 1)
    let_go(cluster, job_id)
    assert cluster.wait_for(job_id, "SUCCEEDED").attempt == 1
