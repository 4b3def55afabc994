"""The kustomize base: schema-checked for many versions, and read by the real command line and loaders.

Not run on a cluster.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from piped.__main__ import build_parser
from piped.config import CoordinatorConfig, NodeConfig, load_coordinator, load_node, parse_address

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
VERSIONS = ("1.28", "1.31", "1.34", "1.37")
POD = {"POD_NAME": "piped-node-0", "POD_IP": "10.1.2.3"}


@cache
def rendered() -> str:
    done = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def objects(kind: str) -> dict[str, Any]:
    return {o["metadata"]["name"]: o for o in yaml.safe_load_all(rendered()) if o["kind"] == kind}


def pod(name: str) -> Any:
    return objects("StatefulSet")[name]["spec"]["template"]["spec"]


def container(name: str) -> Any:
    (only,) = pod(name)["containers"]
    return only


def config(name: str, folder: Path) -> CoordinatorConfig | NodeConfig:
    """Return what the container would run with: its file under its flags, by the real parser and loader."""
    arguments = [str(argument) for argument in container(name)["args"]]
    for key, value in POD.items():
        arguments = [argument.replace(f"$({key})", value) for argument in arguments]
    flags = vars(build_parser().parse_args(arguments))
    mount = {m["mountPath"]: m["name"] for m in container(name)["volumeMounts"]}
    assert mount[str(flags["config"].parent)] == "config"
    (volume,) = [v for v in pod(name)["volumes"] if v["name"] == "config"]
    data = objects("ConfigMap")[volume["configMap"]["name"]]["data"]
    file = folder / flags["config"].name
    file.write_text(data[file.name])
    command = flags.pop("command")
    flags = {key: value for key, value in flags.items() if key not in ("config", "log_level", "accept_rollback")}
    return load_coordinator(file, flags) if command == "coordinator" else load_node(file, flags)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schema(version: str, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(rendered())
    argv = [str(Path(sys.executable).parent / "kubernetes-validate"), "--strict", "-k", version]
    done = subprocess.run([*argv, str(tmp_path / "all.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout + done.stderr
    assert text.count("passed") == rendered().count("\nkind: ") and "WARN" not in text


def test_the_ports_are_those_of_the_configuration_and_the_defaults(tmp_path: Path) -> None:
    made = config("piped-coordinator", tmp_path)
    assert isinstance(made, CoordinatorConfig)
    ports = {p["name"]: p["containerPort"] for p in container("piped-coordinator")["ports"]}
    addresses = {"grpc": made.listen, "http": made.http, "health": made.health}
    assert ports == {name: parse_address(text, name)[1] for name, text in addresses.items()}
    defaults = CoordinatorConfig(tmp_path)
    assert list(ports.values()) == [parse_address(a, "")[1] for a in (defaults.listen, defaults.http, defaults.health)]
    node = config("piped-node", tmp_path)
    assert isinstance(node, NodeConfig) and node.health is not None
    ports = {p["name"]: p["containerPort"] for p in container("piped-node")["ports"]}
    assert ports == {"metrics": parse_address(node.metrics, "")[1], "health": parse_address(node.health, "")[1]}
    assert ports["metrics"] == parse_address(NodeConfig(tmp_path, "n").metrics, "")[1]


def test_a_node_is_named_and_addressed_as_its_pod_and_takes_its_workers_with_it(tmp_path: Path) -> None:
    node = config("piped-node", tmp_path)
    assert isinstance(node, NodeConfig)
    assert (node.name, node.data_address, node.metrics) == ("piped-node-0", "10.1.2.3", "10.1.2.3:9464")
    assert node.stop_workers_on_exit
    assert str(node.slots) == container("piped-node")["resources"]["limits"]["cpu"]


def test_nodes_find_the_coordinators_service(tmp_path: Path) -> None:
    node = config("piped-node", tmp_path)
    assert isinstance(node, NodeConfig)
    host, port = parse_address(node.coordinator, "coordinator")
    service = objects("Service")[host]["spec"]
    assert port in [p["port"] for p in service["ports"]]
    labels = objects("StatefulSet")["piped-coordinator"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()


@pytest.mark.parametrize("name", ["piped-coordinator", "piped-node"])
def test_a_pod_is_restricted_and_keeps_its_state(name: str, tmp_path: Path) -> None:
    assert pod(name)["automountServiceAccountToken"] is False
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    assert pod(name)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container(name)["securityContext"] == confined
    claims = [c["metadata"]["name"] for c in objects("StatefulSet")[name]["spec"]["volumeClaimTemplates"]]
    mounts = {m["mountPath"]: m["name"] for m in container(name)["volumeMounts"]}
    assert mounts[str(config(name, tmp_path).state_dir)] in claims


@pytest.mark.parametrize("name", ["piped-coordinator", "piped-node"])
def test_probes_ask_the_health_port(name: str) -> None:
    (health,) = [p["containerPort"] for p in container(name)["ports"] if p["name"] == "health"]
    probes = {key: value for key, value in container(name).items() if key.endswith("Probe")}
    assert {"livenessProbe", "readinessProbe"} <= set(probes)
    assert {probe["grpc"]["port"] for probe in probes.values()} == {health}


def test_the_loss_of_a_node_is_rare_and_expected() -> None:
    nodes = objects("StatefulSet")["piped-node"]["spec"]
    assert (nodes["podManagementPolicy"], nodes["updateStrategy"]) == ("Parallel", {"type": "OnDelete"})
    assert objects("Service")["piped-node"]["spec"]["publishNotReadyAddresses"] is True
    assert list(objects("PodDisruptionBudget")) == ["piped-node"]
    assert container("piped-node")["command"] == ["/opt/pipectl/bin/python", "/opt/pipectl/init.py"]
    assert objects("StatefulSet")["piped-coordinator"]["spec"]["replicas"] == 1
