"""The container file by its own steps, and the container's PID 1 with a real daemon under it. No engine is needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
DEADLINE_S = 20.0


def eventually(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {DEADLINE_S} s: {what}")


def instructions(name: str) -> list[str]:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{name} (.+)$", text, re.M)


def test_the_run_steps_make_an_environment_whose_commands_start(tmp_path: Path) -> None:
    venv, source = tmp_path / "pipectl", tmp_path / "src"
    for line in instructions("COPY"):  # the build context is what COPY takes, nothing else
        *parts, target = shlex.split(line)
        if not line.startswith("--from") and target in (*parts, "./"):
            for part in parts:
                (source / part).parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-r", str(ROOT / part), str(source / part)], check=True)
    for step in instructions("RUN"):
        command = step.replace("/opt/pipectl", str(venv)).replace("python -m venv", f"{sys.executable} -m venv")
        # Offline: dependencies and the build backend come from the environment of the tests.
        command = command.replace("pip install", "pip install --no-deps --no-index --no-build-isolation")
        done = subprocess.run(["sh", "-ec", command], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
        if "venv" in step:
            packages = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
            (Path(packages) / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import piped, pipectl, pipeapi, stagekit; print(piped.__file__, stagekit.__file__)"
    where = subprocess.run([venv / "bin" / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert where.stdout.count(str(venv)) == 2, where.stdout + where.stderr


def test_every_path_that_the_image_takes_exists() -> None:
    for line in instructions("COPY"):
        if not line.startswith("--from"):
            for part in shlex.split(line)[:-1]:
                assert (ROOT / part).exists(), part
    assert not any("://" in line or "." in line.split("/")[0].split(":")[0] for line in instructions("FROM"))


class Container:
    """init.py as PID 1 would run it, with a node daemon that has no coordinator."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.state = folder / "state"
        argv = [sys.executable, str(FOLDER / "init.py"), "node", "--state-dir", str(self.state)]
        argv += ["--metrics", "127.0.0.1:0", "--coordinator", "127.0.0.1:1", *flags]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def daemon(self, other_than: int = 0) -> int:
        def pid() -> int:
            try:
                found = int(json.loads((self.state / "endpoints.json").read_text())["pid"])
            except FileNotFoundError:
                return 0
            return found if found != other_than else 0

        return int(eventually(pid, "a daemon listens"))


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    started: list[Container] = []
    yield started
    for container in started:
        container.process.kill()
        container.process.communicate()


def test_a_daemon_that_dies_is_started_again_in_place(tmp_path: Path, containers: list[Container]) -> None:
    containers.append(container := Container(tmp_path))
    first = container.daemon()
    os.kill(first, signal.SIGKILL)
    second = container.daemon(other_than=first)
    assert not Path(f"/proc/{first}").exists()  # reaped
    container.process.terminate()
    assert container.process.wait(DEADLINE_S) == 0
    assert not Path(f"/proc/{second}").exists()
    assert container.process.stderr is not None
    assert "piped node ended with -9; it starts again" in container.process.stderr.read()


def test_a_refused_configuration_ends_the_container(tmp_path: Path, containers: list[Container]) -> None:
    containers.append(container := Container(tmp_path, "--slots", "0"))
    assert container.process.wait(DEADLINE_S) == 78
