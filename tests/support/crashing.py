"""Starts the shipped `piped coordinator` as a process that kills itself at the n-th statement of its store.

Run as a program, it imports the coordinator once and forks it for each line on stdin (grpc has no thread yet then), so that a start
costs milliseconds. Only SQLite's connections are wrapped; the product knows nothing of it. `tests/faults` uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypedDict


class Order(TypedDict):
    """What one process is to do: its arguments, where its output goes, and before which statement it dies (0: never)."""

    arguments: list[str]
    log: str
    died: str  # the file to which it appends the statement that it did not do
    at: int


class Mortal(sqlite3.Connection):
    """Counts a point before each statement and one after each COMMIT, when nobody knows of it yet; dies at one."""

    at, died, num_points = 0, "", 0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.set_trace_callback(self._reach)

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        """As any connection does."""
        cursor = super().execute(statement, *arguments)
        if statement == "COMMIT":
            self._reach("after COMMIT")
        return cursor

    def _reach(self, statement: str) -> None:
        Mortal.num_points += 1
        if Mortal.num_points == Mortal.at:
            with Path(Mortal.died).open("a") as file:
                file.write(" ".join(statement.split()[:3]) + "\n")
            os.kill(os.getpid(), signal.SIGKILL)


class Launcher:
    """The program below as a process, which runs one coordinator at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = 0  # of the coordinator that runs now

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls) -> AsyncIterator[Launcher]:
        """Start it; at the end nothing of it is left."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.crashing"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
        )
        launcher = cls(process)
        try:
            yield launcher
        finally:
            launcher.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()

    async def spawn(self, order: Order) -> None:
        """Start a coordinator; the one before must have ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self.pid = int(await self._line())

    async def wait(self) -> int:
        """Return the exit status of the coordinator, negative for a signal."""
        status = int(await self._line())
        self.pid = 0
        return status

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the coordinator, if there is one."""
        if self.pid:
            os.kill(self.pid, number)

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()


def _become(order: Order) -> int:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    Mortal.at, Mortal.died = order["at"], order["died"]
    plain = sqlite3.connect
    sqlite3.connect = lambda *arguments, **more: plain(*arguments, factory=Mortal, **more)  # type: ignore[assignment]
    from piped.__main__ import main

    return main(order["arguments"])


def serve() -> None:
    """Fork a coordinator per line; answer its pid, and its status once it has ended."""
    import piped.coordinator.server  # noqa: F401  # imported once, before every fork

    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            os._exit(_become(json.loads(line)))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
