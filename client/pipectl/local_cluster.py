"""A coordinator and node daemons as real processes of this machine, in one temporary folder; gone without a trace.

Used by `pipectl demo`. Every process has a session of its own, so that Ctrl-C reaches pipectl alone and the end is in
order: nodes stop their workers, then the coordinator leaves, then whatever is left of this folder is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from pipectl.errors import CommandError, Exit

START_S = 30.0
STOP_S = 8.0


class LocalCluster:
    """Context manager: started when entered, stopped and removed when left, whatever happened."""

    def __init__(self, *, nodes: int, slots: int) -> None:
        self._nodes, self._slots = nodes, slots
        self._processes: list[subprocess.Popen[bytes]] = []  # coordinator first

    def __enter__(self) -> LocalCluster:
        self.folder = Path(tempfile.mkdtemp(prefix="pipectl-demo-"))
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

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
        data: dict[str, object] = json.loads((self.folder / name / "endpoints.json").read_text())
        return data

    def _start(self) -> None:
        free = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--health", "127.0.0.1:0"]
        self._launch("coordinator", ["coordinator", *free])
        for n in range(self._nodes):
            flags = ["--coordinator", self.coordinator, "--name", f"node{n}", "--metrics", "127.0.0.1:0"]
            self._launch(f"node{n}", ["node", *flags, "--slots", str(self._slots), "--stop-workers-on-exit"])

    def _launch(self, name: str, arguments: list[str]) -> None:
        state = self.folder / name
        state.mkdir()
        command = [sys.executable, "-m", "piped", *arguments, "--state-dir", str(state)]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )
        self._processes.append(process)
        deadline = time.monotonic() + START_S
        while not (state / "endpoints.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise CommandError(f"{name} did not start:\n{text}", Exit.JOB_FAILED)
            time.sleep(0.02)

    def _stop(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
        try:
            for process in reversed(self._processes):
                process.terminate()
            deadline = time.monotonic() + STOP_S
            for process in reversed(self._processes):
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._kill_rest()
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, before)

    def _kill_rest(self) -> None:
        """Kill what still names our folder in its command line: a shim whose node died early (its workers follow it)."""
        marker = os.fsencode(self.folder)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            left = [pid for pid in _pids() if marker in _command_line(pid)]
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)


def _pids() -> list[int]:
    return [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and int(e.name) != os.getpid()]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
