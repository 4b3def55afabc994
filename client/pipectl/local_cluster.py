"""A coordinator and node daemons as real processes of this machine, in one temporary folder; gone without a trace.

Used by `pipectl demo`. Every process has a session of its own, so that Ctrl-C reaches pipectl alone and the end is in
order: nodes stop their workers, then the coordinator leaves, then whatever is left of this folder is killed. The end
itself can't be interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipectl.errors import CommandError, Exit
from pipectl.interrupts import Interrupts

START_S = 30.0
STOP_S = 8.0


class LocalCluster:
    """`start` it inside a `try` whose `finally` calls `stop`, whatever happened in between.

    No context manager: a signal between entering one and its first statement would leave processes behind.
    """

    def __init__(self, interrupts: Interrupts, *, nodes: int, slots: int) -> None:
        self._interrupts = interrupts
        self._nodes, self._slots = nodes, slots
        self._processes: list[subprocess.Popen[bytes]] = []  # coordinator first
        self.folder: Path | None = None

    @property
    def coordinator(self) -> str:
        """Its gRPC address."""
        return str(self._endpoints("coordinator")["grpc"])

    @property
    def coordinator_http(self) -> str:
        """Its address for /metrics and /sd/prometheus."""
        return str(self._endpoints("coordinator")["http"])

    def node_metrics(self) -> list[str]:
        """Every node's address for /metrics."""
        return [str(self._endpoints(f"node{n}")["metrics"]) for n in range(self._nodes)]

    def _endpoints(self, name: str) -> dict[str, object]:
        assert self.folder is not None, "not started"
        data: dict[str, object] = json.loads((self.folder / name / "endpoints.json").read_text())
        return data

    def start(self) -> None:
        """Return once every process listens. Raises CommandError with the log of one that does not."""
        with self._interrupts.held_off():
            self.folder = Path(tempfile.mkdtemp(prefix="pipectl-demo-"))
        free = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--health", "127.0.0.1:0"]
        self._launch("coordinator", ["coordinator", *free])
        self._wait_for("coordinator", self._processes[0])
        for n in range(self._nodes):
            flags = ["--coordinator", self.coordinator, "--name", f"node{n}", "--metrics", "127.0.0.1:0"]
            self._launch(f"node{n}", ["node", *flags, "--slots", str(self._slots), "--stop-workers-on-exit"])
        for n, process in enumerate(self._processes[1:]):
            self._wait_for(f"node{n}", process)

    def _launch(self, name: str, arguments: list[str]) -> None:
        assert self.folder is not None
        state = self.folder / name
        state.mkdir()
        command = [sys.executable, "-m", "piped", *arguments, "--state-dir", str(state)]
        with self._interrupts.held_off(), (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )
            self._processes.append(process)

    def _wait_for(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert self.folder is not None
        deadline = time.monotonic() + START_S
        while not (self.folder / name / "endpoints.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise CommandError(f"{name} did not start:\n{text}", Exit.JOB_FAILED)
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop every process and remove the folder. From here on no signal interrupts; call it twice to be sure."""
        self._interrupts.end()
        nodes, coordinator = self._processes[1:], self._processes[:1]
        for group in (nodes, coordinator):
            for process in group:
                process.terminate()
            deadline = time.monotonic() + STOP_S
            for process in group:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if self.folder is not None:
            _kill_all_of(self.folder)
            shutil.rmtree(self.folder, ignore_errors=True)


def _kill_all_of(folder: Path) -> None:
    """Kill our processes that still name the folder: a shim whose node died early (its workers follow it).

    Somebody's editor or `tail -f` on a log names it, too, and is left alone.
    """
    marker = os.fsencode(folder)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        left = [pid for pid in _pids() if marker in (line := _command_line(pid)) and b"\0-m\0piped\0" in line]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _pids() -> list[int]:
    return [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and int(e.name) != os.getpid()]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
