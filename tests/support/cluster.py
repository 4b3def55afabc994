"""A real coordinator and real node daemons on this machine, which a test may kill and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from pipeapi.v1 import jobs_pb2
from pipectl.api import Coordinator

START_S = 30.0
TERMINAL = {"SUCCEEDED", "FAILED", "CANCELLED"}


def wait_until(condition, timeout_s=60.0, what="the condition"):
    """Return the first true value of `condition()`; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:.0f} s"
        time.sleep(0.05)
    return value


class Daemon:
    """One process with a state directory and an endpoints.json."""

    def __init__(self, folder: Path, name: str, arguments: list[str]) -> None:
        self.folder, self.name, self.arguments = folder / name, name, arguments
        self.folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        (self.folder / "endpoints.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "piped", *self.arguments, "--state-dir", str(self.folder)]
        with Path(f"{self.folder}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._is_up, START_S, f"{self.name}'s endpoints.json")

    def _is_up(self) -> bool:
        assert self.process.poll() is None, f"{self.name} ended:\n{self.log()[-3000:]}"
        return (self.folder / "endpoints.json").exists()

    def log(self) -> str:
        return Path(f"{self.folder}.log").read_text(errors="replace")

    @property
    def endpoints(self) -> dict[str, str]:
        return json.loads((self.folder / "endpoints.json").read_text())

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(timeout=30)


class Cluster:
    """Start with `with Cluster(folder, nodes=2) as cluster`; leaving it stops every process and checks that none is left."""

    def __init__(self, folder: Path, *, nodes: int = 2, slots: int = 2) -> None:
        self.folder = folder
        any_port = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--health", "127.0.0.1:0"]
        self.coordinator = Daemon(folder, "coordinator", ["coordinator", *any_port])
        self.address = self.coordinator.endpoints["grpc"]
        self.coordinator.arguments[2] = self.address  # a restart takes the same port
        self.coordinator.arguments[4] = self.coordinator.endpoints["http"]
        self.nodes = [self._node(n, slots) for n in range(nodes)]

    def _node(self, n: int, slots: int) -> Daemon:
        flags = ["--coordinator", self.address, "--name", f"node{n}", "--metrics", "127.0.0.1:0"]
        return Daemon(self.folder, f"node{n}", ["node", *flags, "--slots", str(slots), "--stop-workers-on-exit"])

    def __enter__(self) -> Cluster:
        self.api = Coordinator(self.address)
        wait_until(lambda: len(self.api.nodes()) == len(self.nodes), 20, "every node's registration")
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in [*self.nodes, self.coordinator]:
            if daemon.process.poll() is None:
                daemon.process.terminate()
        for daemon in [*self.nodes, self.coordinator]:
            try:
                daemon.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        left = wait_for_no_process_of(self.folder)
        assert not left, f"processes left: {left}"

    # ---- jobs

    def pipectl(self, *arguments: str, timeout_s: float = 120.0, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run pipectl against this coordinator."""
        command = [sys.executable, "-m", "pipectl", "--coordinator", self.address, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **kwargs)

    def submit(self, spec: dict[str, object], *flags: str) -> str:
        """Submit a job file; return the job's id."""
        path = self.folder / f"{spec['name']}.yaml"
        path.write_text(yaml.safe_dump(spec))
        done = self.pipectl("submit", str(path), "--no-check", *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job_id: str) -> str:
        return jobs_pb2.JobState.Name(self.api.get(job_id).state).removeprefix("JOB_STATE_")

    def wait_for(self, job_id: str, *states: str, timeout_s: float = 180.0) -> jobs_pb2.Job:
        """Wait until the job is in one of `states`; a terminal one that was not wanted fails at once."""

        def reached() -> bool:
            state = self.state(job_id)
            assert state in states or state not in TERMINAL, f"{job_id} is {state}:\n{self.describe(job_id)}"
            return state in states

        wait_until(reached, timeout_s, f"{job_id} in {states}")
        return self.api.get(job_id)

    def run(self, spec: dict[str, object], *, timeout_s: float = 240.0) -> jobs_pb2.Job:
        """Submit a job and wait until it succeeded."""
        return self.wait_for(self.submit(spec), "SUCCEEDED", timeout_s=timeout_s)

    def describe(self, job_id: str) -> str:
        return self.pipectl("describe", job_id).stdout

    def records(self, job_id: str, kind: str) -> list[dict[str, object]]:
        """Return the JSON lines that the job's workers recorded: "STEPS", "TRACE" or "PLAN"."""
        files = self.api.records(job_id, jobs_pb2.RecordKind.Value(f"RECORD_KIND_{kind}"))
        return [json.loads(line) for rank in sorted(files) for line in files[rank].splitlines() if line]

    def losses(self, job_id: str) -> list[float]:
        return [step["loss"] for step in self.records(job_id, "STEPS")]


def processes_of(folder: Path) -> dict[int, str]:
    """Return live processes whose command line or environment names `folder`."""
    found = {}
    marker = os.fsencode(folder)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marker in command and state != "Z":
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_for_no_process_of(folder: Path, timeout_s: float = 10.0) -> dict[int, str]:
    """Return what is left after at most `timeout_s`; nothing, if all is well."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
