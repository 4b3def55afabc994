"""The systemd units, checked offline: systemd reads them, the real CLI and loader take what they say."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from piped.__main__ import build_parser
from piped.config import CoordinatorConfig, NodeConfig, load_coordinator, load_node

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = ("piped-coordinator.service", "piped-node.service")


def settings(unit: str) -> dict[str, str]:
    lines = (FOLDER / unit).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_reads_the_unit_without_a_word(unit: str, tmp_path: Path) -> None:
    text = (FOLDER / unit).read_text().replace("/opt/pipectl/bin/piped", sys.executable)
    (tmp_path / unit).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")  # an unknown key only warns


@pytest.mark.parametrize(("unit", "threshold"), [(UNITS[0], 15), (UNITS[1], 25)])
def test_the_service_is_confined(unit: str, threshold: int) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={threshold}", str(FOLDER / unit)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.parametrize("unit", UNITS)
def test_the_command_line_is_ours(unit: str) -> None:
    program, *arguments = shlex.split(settings(unit)["ExecStart"].replace("%S", "/var/lib"))
    assert program == "/opt/pipectl/bin/piped"
    flags = build_parser().parse_args(arguments)
    assert flags.command == unit.removeprefix("piped-").removesuffix(".service")
    assert str(flags.state_dir) == f"/var/lib/{settings(unit)['StateDirectory']}"


def test_the_shipped_configuration_states_the_defaults(tmp_path: Path) -> None:
    coordinator = load_coordinator(FOLDER / "coordinator.toml", {"state_dir": tmp_path})
    assert coordinator == CoordinatorConfig(tmp_path)
    node = load_node(FOLDER / "node.toml", {"state_dir": tmp_path})
    assert replace(node, name="n") == NodeConfig(tmp_path, "n")


def test_every_key_of_the_configuration_is_shown_in_the_shipped_files() -> None:
    for name, kind in (("coordinator", CoordinatorConfig), ("node", NodeConfig)):
        text = (FOLDER / f"{name}.toml").read_text()
        keys = set(kind.__dataclass_fields__) - {"state_dir", "stop_workers_on_exit"}  # those are the unit's business
        assert [key for key in sorted(keys) if f"{key} = " not in text] == []


def test_jobs_outlive_the_node_daemon() -> None:
    unit = settings("piped-node.service")
    assert (unit["KillMode"], unit["Delegate"], unit["OOMPolicy"]) == ("process", "yes", "continue")
    assert unit["User"] == "piped"  # a dynamic user would end with the daemon
    assert not {"RuntimeDirectory", "PrivateTmp", "MemoryDenyWriteExecute", "DynamicUser"} & set(unit)


@pytest.mark.parametrize("unit", UNITS)
def test_a_bad_configuration_is_not_restarted(unit: str) -> None:
    assert (settings(unit)["Restart"], settings(unit)["RestartPreventExitStatus"]) == ("always", "78")
    assert settings(unit)["Type"] == "notify"
