"""Hosts of their own (network namespaces) that share nothing but a wire: stages, and replicas of stages, over them."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.e2e.programs import broken
from tests.support import reference
from tests.support.cluster import wait_until
from tests.support.hosts import Hosts, fleet

PROGRAMS = Path(__file__).parent / "programs"
STEPS, SEED = 5, 3


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    with fleet(folder, nodes=4, slots=2) as pipectl:
        yield pipectl, folder


def submit(pipectl, folder, name, *flags, per_node=2, params=None, steps=STEPS, **pipeline):
    spec = {
        "version": 1,
        "name": name,
        "program": "broken:Fine",
        "source": str(PROGRAMS),
        "params": params or {},
        "pipeline": {"chunks": 4, **pipeline},
        "train": {"steps": steps, "seed": SEED, "log_every": 1},
        "resources": {"slots_per_node": per_node},
        "env": {"STAGEKIT_TRANSPORT": "gloo"},  # under one kernel they would share memory, not the wire
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    done = pipectl("submit", "--no-check", *flags, str(folder / f"{name}.yaml"))
    assert done.returncode == 0, done.stderr


def found(pipectl, name):
    return json.loads(pipectl("get", "jobs", name, "-o", "json").stdout)


def test_stages_on_two_hosts_train_over_the_data_address(four):
    pipectl, folder = four
    submit(pipectl, folder, "hosts", "--wait", stages=4)
    job = found(pipectl, "hosts")
    assert [worker["node_name"] for worker in job["workers"]] == ["a", "a", "b", "b"]
    events = pipectl("events", "hosts").stdout
    assert f"store_listens     {Hosts.address(0)}:" in events, events
    logs = pipectl("logs", "hosts").stdout
    assert logs.count("weights_digest") == 4


def test_replicas_on_four_hosts_train_over_the_data_interface_as_one_process_does(four):
    pipectl, folder = four
    submit(pipectl, folder, "wide", "--wait", per_node=1, stages=2, replicas=2)
    assert {worker["node_name"] for worker in found(pipectl, "wide")["workers"]} == {"a", "b", "c", "d"}
    said = [line.partition("] ")[2] for line in pipectl("logs", "wide").stdout.splitlines()]
    logs = [json.loads(text) for text in said if text.startswith("{")]  # torch's own lines are not
    losses, _ = reference.train(broken.Fine(), steps=STEPS, chunks=4, seed=SEED, replicas=2)
    told = [line["loss"] for line in logs if line.get("event") == "step"]
    assert told == pytest.approx(losses, abs=1e-4)  # the log rounds
    digests = {(tuple(line["stages"]), line["digest"]) for line in logs if line.get("event") == "weights_digest"}
    assert {stages for stages, _ in digests} == {(0,), (1,)} and len(digests) == 2


def test_a_killed_worker_of_a_replica_on_its_own_host_is_blamed_and_nobody_else(four):
    pipectl, folder = four
    submit(pipectl, folder, "killed", per_node=1, params={"pause_s": 0.1}, steps=400, stages=2, replicas=2)

    def progressed():
        job = found(pipectl, "killed")
        assert job["state"] not in ("FAILED", "JOB_STATE_FAILED"), pipectl("describe", "killed").stdout
        return job if int(job.get("progress", {}).get("step", 0)) >= 3 else None

    job = wait_until(progressed, 90, "the third step", every_s=0.5)
    victim = next(worker for worker in job["workers"] if worker.get("rank") == 3)
    environment = Path(f"/proc/{victim['pid']}/environ").read_bytes().split(b"\0")
    assert b"GLOO_SOCKET_IFNAME=eth0" in environment
    os.kill(int(victim["pid"]), signal.SIGKILL)
    assert pipectl("wait", "killed").returncode == 1
    text = pipectl("describe", "killed").stdout
    verdict, _, parts = text.partition("\nAttempt 1 failed")
    assert "SIGNALLED: rank 3 (stages [1]) on" in verdict and "PeerError" not in verdict
    assert "ROOT" in parts  # its neighbours are victims, or were stopped before they could tell
