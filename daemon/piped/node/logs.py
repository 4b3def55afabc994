"""Reading a rank's files by offset: its rotated log, traces, step records and plan. Blocking, so called in a thread.

Offsets count the bytes that the rank ever wrote: for a rotated log, the first line of `log` says where it begins
(piped.shim.logfile writes it). What rotation dropped is answered with one line that says so. Called by
piped.node.bulk.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from piped.node.attempt_dir import AttemptDir

_CONTINUATION = re.compile(rb"\xe2\x80\xa6 dropped (\d+) bytes, (\d+) more are in log\.1\n")
_ROTATION_TRIES = 100


class Record(StrEnum):
    """A file of a rank; the value is its name in the rank's directory."""

    LOG = "log"
    TRACE = "trace.jsonl"
    STEPS = "steps.jsonl"
    PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file; `is_last`: the rank is over and nothing follows."""

    data: bytes
    next_offset: int
    is_last: bool


class NoRecord(Exception):
    """The file can't be had here; the text says why."""


def read(
    attempts: Path, fence: int, rank: int, record: Record, *, offset: int, tail_bytes: int, max_bytes: int
) -> Piece:
    """Return at most `max_bytes` from `offset` on, or of the last `tail_bytes` when offset is 0. Raises NoRecord."""
    attempt = AttemptDir(attempts / str(fence), fence)
    if not attempt.path.is_dir():
        raise NoRecord(f"attempt {fence} is not on this node (any more)")
    is_over = _is_over(attempt, rank)  # before the read: what was written until then is read
    folder = attempt.rank_dir(rank)
    try:
        if record is Record.LOG:
            data, begin, end = _read_log(folder, offset, tail_bytes, max_bytes)
        else:
            data, begin, end = _read_plain(folder / record.value, offset, tail_bytes, max_bytes)
    except FileNotFoundError:
        return Piece(b"", offset, is_over)
    except OSError as error:
        raise NoRecord(f"{record.value} of rank {rank}, attempt {fence}: {error.strerror}") from error
    return Piece(data, begin, is_over and begin >= end)


def _is_over(attempt: AttemptDir, rank: int) -> bool:
    if attempt.is_closed or attempt.preparation_error is not None:
        return True
    if (attempt.rank_dir(rank) / "exit.json").exists():
        return True
    return attempt.had_shim and not attempt.shim_is_alive()


def _read_plain(path: Path, offset: int, tail_bytes: int, max_bytes: int) -> tuple[bytes, int, int]:
    """Return (data, offset after it, end of the file)."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        begin = max(0, end - tail_bytes) if tail_bytes and not offset else min(offset, end)
        file.seek(begin)
        data = file.read(max_bytes)
    return data, begin + len(data), end


def _read_log(folder: Path, offset: int, tail_bytes: int, max_bytes: int) -> tuple[bytes, int, int]:
    for _ in range(_ROTATION_TRIES):
        try:
            answer = _try_log(folder, offset, tail_bytes, max_bytes)
        except FileNotFoundError:
            if not (folder / "log.1").exists():
                raise
            continue  # between the two renames of a rotation
        if answer is not None:
            return answer
    return b"", offset, offset + 1


def _try_log(folder: Path, offset: int, tail_bytes: int, max_bytes: int) -> tuple[bytes, int, int] | None:
    """Read once; None if the log was rotated meanwhile."""
    with (folder / "log").open("rb") as current:
        header = _CONTINUATION.match(current.readline(256))
        dropped, kept = (int(header[1]), int(header[2])) if header else (0, 0)
        skip, start = len(header[0]) if header else 0, dropped + kept
        end = start + current.seek(0, os.SEEK_END) - skip
        begin = max(0, end - tail_bytes) if tail_bytes and not offset else min(offset, end)
        if begin >= start:
            current.seek(skip + begin - start)
            data = current.read(max_bytes)
            return data, begin + len(data), end
        if begin < dropped:
            return f"… dropped {dropped - begin} bytes\n".encode(), dropped, end
        with (folder / "log.1").open("rb") as older:
            older_header = _CONTINUATION.match(older.readline(256)) if dropped else None
            older.seek((len(older_header[0]) if older_header else 0) + begin - dropped)
            data = older.read(min(max_bytes, start - begin))
        if (folder / "log").stat().st_ino != os.fstat(current.fileno()).st_ino:
            return None
        return data, begin + len(data), end
