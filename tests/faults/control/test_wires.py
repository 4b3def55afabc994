"""Hosts of their own: one that another doesn't reach, one whose clock is an hour ahead; what get nodes says of wires and clocks."""

import json

import pytest
import yaml

from tests.faults.control.scripts import acts
from tests.support.cluster import wait_until
from tests.support.hosts import Hosts, fleet_on, ip

APART = {"slots_per_node": 1}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wires")
    ahead = folder / "ahead.toml"
    ahead.write_text("clock_offset_s = 3600.0\n")
    flags = {"c": ["--config", str(ahead)]}
    with Hosts(4) as hosts, fleet_on(hosts, folder, nodes=3, slots=1, flags_of=flags) as pipectl:
        yield pipectl, folder, hosts


class Folder:
    """What `acts` asks of a cluster."""

    def __init__(self, folder):
        self.folder = folder


def submit(pipectl, folder, name, ranks):
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(acts(Folder(folder), name, "done", ranks=ranks, resources=APART)))
    done = pipectl("submit", "--no-check", str(file))
    assert done.returncode == 0, done.stderr


def nodes_of(pipectl):
    return {node["node_name"]: node for node in json.loads(pipectl("get", "nodes", "-o", "json").stdout)}


def test_a_job_leaves_out_the_node_that_its_neighbour_does_not_reach_and_says_why(three):
    pipectl, folder, hosts = three
    ip("-n", hosts.names[0], "route", "add", "prohibit", hosts.address(1))  # a reaches the coordinator and c, not b
    try:
        submit(pipectl, folder, "around", ranks=2)
        assert pipectl("wait", "around").returncode == 0
    finally:
        ip("-n", hosts.names[0], "route", "del", "prohibit", hosts.address(1))
    job = json.loads(pipectl("get", "jobs", "around", "-o", "json").stdout)
    assert [worker["node_name"] for worker in job["workers"]] == ["a", "c"]
    events = pipectl("events", "around").stdout
    assert f"node a could not prepare: there is no route to b's data address {hosts.address(1)}" in events, events


def test_get_nodes_shows_wires_and_clocks_and_a_clock_an_hour_ahead_decides_nothing(three):
    pipectl, folder, _ = three
    submit(pipectl, folder, "all", ranks=3)
    assert pipectl("wait", "all").returncode == 0
    wait_until(
        lambda: all("edges" in node for node in nodes_of(pipectl).values()), 20, "every node's wires", every_s=0.5
    )
    found = nodes_of(pipectl)
    assert {edge["node_name"] for edge in found["b"]["edges"]} == {"a", "c"}
    assert all(edge["rtt_s"] > 0 and edge["bytes_per_s"] > 0 for edge in found["b"]["edges"])
    assert abs(found["a"]["clock_offset_s"]) <= found["a"]["clock_error_s"] + 0.5
    assert abs(found["c"]["clock_offset_s"] - 3600) <= found["c"]["clock_error_s"] + 0.5
    table = pipectl("get", "nodes", "-o", "wide").stdout
    assert "+3600." in table and "MB/s" in table and "SLOWEST WIRE" in table
