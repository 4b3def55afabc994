"""Starting on several nodes: one that never prepares, jobs that want the same nodes, ports that others want, lost replies."""

import signal
import socket
import threading

import pytest

from pipectl import jobfile
from pipectl.api import Coordinator
from tests.faults.control.scripts import acts, event, let_go, rows, running
from tests.faults.jobs import job
from tests.support.cluster import wait_until
from tests.support.relay import relay_to

APART = {"slots_per_node": 1}


def spec_of(cluster, job):
    return jobfile.load(cluster.write(job)).spec


def test_a_start_that_one_of_three_nodes_never_prepares_is_given_up_naming_it_while_another_job_proceeds(cluster):
    halted = cluster.nodes[2]
    stuck, other = (
        spec_of(cluster, acts(cluster, name, "done", ranks=ranks, resources=APART))
        for name, ranks in (("stuck", 3), ("other", 2))
    )
    halted.process.send_signal(signal.SIGSTOP)
    try:
        stuck_id, other_id = cluster.api.submit(stuck), cluster.api.submit(other)
        assert cluster.wait_for(other_id, "SUCCEEDED").attempt == 1
        reason = event(cluster, stuck_id, "attempt_stopping")  # its neighbour misses it about when its lease ends
        assert "node2 (stage 2 of rank 2) is not reached" in reason or "node node2 was lost before" in reason, reason
        assert cluster.pipectl("cancel", stuck_id).returncode == 0
        started = "SELECT count(*) FROM workers JOIN attempts USING (fence) WHERE job_id = ? AND pid > 0"
        assert rows(cluster, started, stuck_id) == [(0,)], "all or nothing"
    finally:
        halted.process.send_signal(signal.SIGCONT)
    wait_until(lambda: all(node.state == 1 for node in cluster.api.nodes()), 20, "node2's return")


def test_two_gangs_that_each_need_two_of_three_nodes_both_finish(cluster):
    whole = {"slots_per_node": 2}  # four ranks are two whole nodes
    jobs = [spec_of(cluster, acts(cluster, f"gang{n}", "until_file", ranks=4, resources=whole)) for n in range(2)]
    first, second = (cluster.api.submit(each) for each in jobs)
    running(cluster, first)
    held = "SELECT count(*) FROM reservations"
    assert (cluster.state(second), rows(cluster, held)) == ("QUEUED", [(4,)]), "the second holds nothing meanwhile"
    let_go(cluster, first)
    running(cluster, second)
    let_go(cluster, second)
    for each in (first, second):
        assert cluster.wait_for(each, "SUCCEEDED").attempt == 1


def test_nobody_can_take_the_port_of_a_store_and_no_two_jobs_meet_on_one(cluster):
    ids = [
        cluster.submit(job(f"port{n}", stages=1, pause_s=0.05)) for n in range(2)
    ]  # real workers, which bind real stores
    ends = [event(cluster, each, "store_listens") for each in ids]
    assert len(set(ends)) == len(ids)
    for end in ends:
        host, _, port = end.rpartition(":")
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="Address already in use"):
                thief.bind((host, int(port)))
    for each in ids:
        assert cluster.wait_for(each, "SUCCEEDED").attempt == 1


def test_a_submit_whose_reply_is_lost_is_sent_again_and_makes_no_second_job(cluster):
    spec = spec_of(cluster, acts(cluster, "twice", "done"))
    with relay_to(cluster.address) as relay:
        api, answers = Coordinator(relay.address), []
        api.nodes()  # the connection stands
        relay.withhold_answers()
        submitting = threading.Thread(target=lambda: answers.append(api.submit(spec)))
        submitting.start()
        count = "SELECT job_id FROM jobs WHERE name = 'twice'"
        wait_until(lambda: rows(cluster, count), 20, "the job in the store")
        relay.cut()
        relay.pass_answers()
        submitting.join(timeout=30)
    assert [(each,) for each in answers] == rows(cluster, count), "one job, and its id came back"
    assert cluster.wait_for(answers[0], "SUCCEEDED").attempt == 1


def test_an_environment_value_that_no_process_can_have_is_refused_with_its_size_before_anything_starts(cluster):
    jobs = rows(cluster, "SELECT count(*) FROM jobs")
    done = cluster.pipectl(
        "submit", "--no-check", cluster.write(acts(cluster, "big", "done", env={"BIG": "x" * 131_072}))
    )
    assert done.returncode != 0
    assert "BIG: 131072 bytes" in done.stderr and "at most 131068" in done.stderr, done.stderr
    assert rows(cluster, "SELECT count(*) FROM jobs") == jobs
