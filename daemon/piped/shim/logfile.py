"""One rank's log on disk: bytes as they came, bounded. Standard library only.

Two files of at most half the limit each: when `log` is full it becomes `log.1`, and a new `log` begins with a line
that says how many bytes are gone and how many are in `log.1`. A reader computes offsets from that line alone
(piped.node.logs). Nothing is fsynced. What can't be written (a full disk) is counted and said once there is room.
"""

from __future__ import annotations

import os
from pathlib import Path

LIMIT_BYTES = 64 << 20
TAIL_BYTES = 64 << 10


def continuation(dropped: int, kept: int) -> bytes:
    """Return the first line of a `log` that has a `log.1`."""
    return f"… dropped {dropped} bytes, {kept} more are in log.1\n".encode()


class LogFile:
    """Append to `directory`/log; never raises on a write."""

    def __init__(self, directory: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = directory / "log"
        self._limit = limit_bytes // 2
        self._file = self._open(self._path)
        self._size = 0  # of the rank's own bytes in the current file
        self._start = 0  # bytes of the rank before the current file
        self._unwritten = 0

    def write(self, data: bytes) -> None:
        """Append `data`, rotating first when the file is full."""
        if self._size and self._size + len(data) > self._limit:
            self._rotate()
        if self._unwritten:
            note = f"\n… dropped {self._unwritten} bytes: they could not be written\n".encode()
            if self._append(note) == len(note):
                self._unwritten = 0
        self._unwritten += len(data) - self._append(data)

    def tail(self, limit_bytes: int = TAIL_BYTES) -> str:
        """Return the end of the log as text."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - limit_bytes))
                return file.read(limit_bytes).decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._file)

    def _append(self, data: bytes) -> int:
        try:
            written = os.write(self._file, data)
        except OSError:
            return 0
        self._size += written
        return written

    def _rotate(self) -> None:
        fresh, number = self._path.with_name(".log.new"), -1
        try:
            number = self._open(fresh)
            os.write(number, continuation(self._start, self._size))
            self._path.rename(self._path.with_name("log.1"))
            fresh.rename(self._path)
        except OSError:  # keep the file that we have; the next write tries again
            if number >= 0:
                os.close(number)
            return
        os.close(self._file)
        self._start += self._size
        self._file, self._size = number, 0

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
