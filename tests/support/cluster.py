"""A real coordinator and real node daemons on this machine, which a test may kill and start again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import yaml

from pipeapi.v1 import jobs_pb2
from pipectl.api import Coordinator
from piped.cgroup import groups_of

START_S = 30.0
TERMINAL = {"SUCCEEDED", "FAILED", "CANCELLED"}


def wait_until(condition, timeout_s=60.0, what="the condition", *, every_s=0.05):
    """Return the first true value of `condition()`, asked every `every_s`; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:.0f} s"
        time.sleep(every_s)
    return value


class Daemon:
    """One process with a state directory and an endpoints.json; `within` is the command that starts it elsewhere."""

    def __init__(self, folder: Path, name: str, arguments: list[str], within: Sequence[str] = ()) -> None:
        self.folder, self.name, self.arguments, self.within = folder / name, name, arguments, within
        self.folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        (self.folder / "endpoints.json").unlink(missing_ok=True)
        piped = [sys.executable, "-m", "piped", *self.arguments, "--state-dir", str(self.folder)]
        command = [*self.within, *piped]
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
    """Start with `with Cluster(folder, nodes=2) as cluster`; leaving it stops everything and checks that nothing is left.

    Nothing is: no process that names the folder or carries a mark of its attempts, no port of it that still listens.
    """

    def __init__(self, folder: Path, *, nodes: int = 2, slots: int = 2) -> None:
        self.folder = folder
        any_port = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--health", "127.0.0.1:0"]
        self.coordinator = Daemon(folder, "coordinator", ["coordinator", *any_port])
        self.address = self.coordinator.endpoints["grpc"]
        self.coordinator.arguments[2] = self.address  # a restart takes the same port
        self.coordinator.arguments[4] = self.coordinator.endpoints["http"]
        self.nodes: list[Daemon] = []
        for _ in range(nodes):
            self.add_node(slots)

    def add_node(self, slots: int, *more: str, within: Sequence[str] = ()) -> Daemon:
        """Start one more node daemon, with `more` flags, by the command `within`."""
        name = f"node{len(self.nodes)}"
        flags = ["--coordinator", self.address, "--name", name, "--metrics", "127.0.0.1:0"]
        arguments = ["node", *flags, "--slots", str(slots), "--stop-workers-on-exit", *more]
        self.nodes.append(Daemon(self.folder, name, arguments, within))
        return self.nodes[-1]

    def __enter__(self) -> Cluster:
        self.api = Coordinator(self.address)
        wait_until(lambda: len(self.api.nodes()) == len(self.nodes), 20, "every node's registration")
        return self

    def __exit__(self, *_: object) -> None:
        markers, addresses = self.markers(), self.addresses()
        for daemon in [*self.nodes, self.coordinator]:
            if daemon.process.poll() is None:
                daemon.process.terminate()
        for daemon in [*self.nodes, self.coordinator]:
            try:
                daemon.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        left = wait_for_no_process_of(self.folder, markers)
        assert not left, f"processes left: {left}"
        still = addresses & listening()
        assert not still, f"still listening: {still}"

    def markers(self) -> set[str]:
        """Return PIPED_SHIM=… of every attempt that the nodes keep."""
        return self.markers_on("node*")

    def markers_on(self, name: str) -> set[str]:
        """Return the same of the nodes whose names fit the pattern."""
        files = self.folder.glob(f"{name}/attempts/*/attempt.json")
        return {f"PIPED_SHIM={json.loads(file.read_text())['marker']}" for file in files}

    def shims(self) -> set[str]:
        """Return the uuids of those attempts."""
        return {marker.removeprefix("PIPED_SHIM=") for marker in self.markers()}

    def addresses(self) -> set[str]:
        """Return every host:port that the daemons say they listen on."""
        running = [daemon for daemon in [*self.nodes, self.coordinator] if daemon.process.poll() is None]
        ends = [value for daemon in running for value in daemon.endpoints.values()]
        return {value for value in ends if isinstance(value, str)}

    def check_no_leak(self) -> None:
        """For when every job is over: so must be every process of their attempts, and every slot must be free."""
        left = wait_for_no_process_of(None, self.markers())
        assert not left, f"processes left: {left}"
        wait_until(lambda: not any(node.slots_used for node in self.api.nodes()), 10, "the release of every slot")
        wait_until(lambda: not any(map(groups_of, self.shims())), 10, "the removal of every cgroup")

    def attempt_dirs(self, job_id: str) -> list[Path]:
        """Return the directories of every attempt of a job, over all nodes."""
        files = self.folder.glob("node*/attempts/*/attempt.json")
        return sorted(file.parent for file in files if json.loads(file.read_text())["job_id"] == job_id)

    # ---- jobs

    def pipectl(self, *arguments: str, timeout_s: float = 120.0, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run pipectl against this coordinator."""
        command = [sys.executable, "-m", "pipectl", "--coordinator", self.address, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **kwargs)

    def submit(self, spec: dict[str, object], *flags: str) -> str:
        """Submit a job file; return the job's id."""
        done = self.pipectl("submit", self.write(spec), "--no-check", *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def write(self, spec: dict[str, object]) -> str:
        """Write a job file; return its path."""
        path = self.folder / f"{spec['name']}.yaml"
        path.write_text(yaml.safe_dump(spec))
        return str(path)

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

    def events(self, job_id: str, name: str) -> list[jobs_pb2.Event]:
        """Return the job's events of that name."""
        request = jobs_pb2.EventsRequest(job=job_id)
        return [each for each in self.api.call(self.api.jobs.Events, request).events if each.name == name]

    def losses(self, job_id: str) -> list[float]:
        return [step["loss"] for step in self.records(job_id, "STEPS")]


def processes_of(folder: Path | None, markers: Collection[str] = ()) -> dict[int, str]:
    """Return live processes whose command line names `folder` or whose environment has one of `markers`, NAME=value."""
    found = {}
    name, marks = os.fsencode(folder) if folder else None, {os.fsencode(marker) for marker in markers}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            environment = (entry / "environ").read_bytes().split(b"\0") if marks else []
        except OSError:  # gone meanwhile, or another user's
            continue
        is_named = name is not None and name in command
        if state != "Z" and (is_named or not marks.isdisjoint(environment)):
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_for_no_process_of(
    folder: Path | None, markers: Collection[str] = (), timeout_s: float = 10.0
) -> dict[int, str]:
    """Return what is left after at most `timeout_s`; nothing, if all is well."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(folder, markers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def listening() -> set[str]:
    """Return the IPv4 addresses, as host:port, on which anything of this machine listens."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            host, port = local.split(":")
            found.add(f"{socket.inet_ntoa(bytes.fromhex(host)[::-1])}:{int(port, 16)}")
    return found
