"""What the shim asks of Linux: subreaper, process identities, children, a socket under a path of any length.

Standard library only; called by the shim's other modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PF_EXITING = 0x4  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make every descendant whose parent died a child of this process. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def boottime_ns() -> int:
    """Return nanoseconds since boot, suspend included: comparable between processes of one host."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def stat_fields(pid: int) -> list[str] | None:
    """Return /proc/<pid>/stat from field 3 (state) on, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rfind(")") + 2 :].split()  # the name before it may hold blanks and parentheses


def starttime(pid: int) -> int:
    """Return the clock ticks since boot at which `pid` began (field 22), 0 when it is gone."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def is_exiting(pid: int) -> bool:
    """Return whether `pid` is on its way out: a dying process closes its sockets, which its peers see, before it can be
    reaped.
    """
    fields = stat_fields(pid)
    return fields is None or bool(int(fields[6]) & _PF_EXITING)


def live_children() -> list[int]:
    """Return the children of this process that are not zombies."""
    mine, children = str(os.getpid()), []
    for entry in Path("/proc").iterdir():  # no CONFIG_PROC_CHILDREN needed; only called when something ended
        if entry.name.isdigit():
            fields = stat_fields(int(entry.name))
            if fields and fields[1] == mine and fields[0] not in "ZX":
                children.append(int(entry.name))
    return children


def environment_value(pid: int, name: str) -> str | None:
    """Return what `name` was in the environment of `pid` when it was exec'd."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{name}=".encode()
    return next((e[len(prefix) :].decode(errors="replace") for e in entries if e.startswith(prefix)), None)


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to process group `pid`, and to `pid` itself if it has left its group.

    Never twice to one: the second would meet a worker whose interpreter, on its way out, has given up its handler.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) != pid:
            os.kill(pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def listen_in(directory: Path, name: str) -> socket.socket:
    """Return a non-blocking unix listener at `directory`/`name`.

    Bound through /proc/self/fd: an address holds 107 bytes only, a state directory may be longer.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)
    listener.listen(8)
    return listener


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix connection."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
