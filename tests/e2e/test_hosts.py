"""Three hosts of their own (network namespaces): a coordinator and two nodes that share nothing but a wire."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.cluster import wait_for_no_process_of, wait_until
from tests.support.hosts import Hosts

PROGRAMS = Path(__file__).parent / "programs"
PYTHON = sys.executable


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    with Hosts(3) as hosts:
        processes = []

        def start(n, name, *arguments):
            with (folder / f"{name}.log").open("wb") as log:
                command = hosts.command(
                    n, PYTHON, "-m", "piped", *arguments, "--state-dir", str(folder / name), "--insecure"
                )
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            wait_until((folder / name / "endpoints.json").exists, 30, f"{name}'s start")

        def pipectl(*arguments):
            command = hosts.command(2, PYTHON, "-m", "pipectl", "--coordinator", f"{hosts.address(2)}:7400", *arguments)
            return subprocess.run(command, capture_output=True, text=True, timeout=180)

        try:
            here = hosts.address(2)
            flags = ["--listen", f"{here}:7400", "--http", f"{here}:7401", "--health", "127.0.0.1:0"]
            start(2, "coordinator", "coordinator", *flags)
            for n, name in enumerate(("a", "b")):
                address = hosts.address(n)
                flags = ["--coordinator", f"{here}:7400", "--data-address", address, "--metrics", f"{address}:9464"]
                start(n, name, "node", "--name", name, *flags, "--slots", "2", "--stop-workers-on-exit")
            wait_until(lambda: len(json.loads(pipectl("get", "nodes", "-o", "json").stdout)) == 2, 20, "both nodes")
            yield pipectl, folder
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(timeout=30)
            assert wait_for_no_process_of(folder) == {}


def test_stages_on_two_hosts_train_over_the_data_address(fleet):
    pipectl, folder = fleet
    spec = {
        "version": 1,
        "name": "hosts",
        "program": "broken:Fine",
        "source": str(PROGRAMS),
        "pipeline": {"stages": 4, "chunks": 4},
        "train": {"steps": 5},
        "env": {"STAGEKIT_TRANSPORT": "gloo"},  # under one kernel they would share memory, not the wire
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    done = pipectl("submit", "--no-check", "--wait", str(folder / "job.yaml"))
    assert done.returncode == 0, done.stderr
    job = json.loads(pipectl("get", "jobs", "hosts", "-o", "json").stdout)
    assert [worker["node_name"] for worker in job["workers"]] == ["a", "a", "b", "b"]
    events = pipectl("events", "hosts").stdout
    assert f"store_listens     {Hosts.address(0)}:" in events, events
    logs = pipectl("logs", "hosts").stdout
    assert logs.count("weights_digest") == 4
