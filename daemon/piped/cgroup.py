"""A memory cgroup per rank, where the shim's own group may be divided: a limit, and who was killed for want of memory.

OOM is told from the kernel's counters alone: a bare SIGKILL may be anybody's. A rank's leaf counts its own kills; without
leaves the enclosing group's counter tells, if it rose just before a rank died of SIGKILL. Version 1 and 2 differ in names; under
version 2 a group with processes can't be divided, so leaves lie beside the daemon's own group where that is called
`daemon` (systemd: DelegateSubgroup=daemon). Standard library only; used by
piped.shim, and by piped.node to remove what a killed shim left.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

DAEMONS = "daemon"
_PREFIX = "piped-"
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Names:
    """What the files of one version are called; swap is limited with the memory, else a limit would only slow a rank down."""

    limit: str
    swap: tuple[str, bool]  # whether it holds the sum of both
    events: str
    kill: str  # empty: one by one


V1 = Names("memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", True), "memory.oom_control", "")
V2 = Names("memory.max", ("memory.swap.max", False), "memory.events", "cgroup.kill")


@dataclass(frozen=True, slots=True)
class Group:
    """One cgroup."""

    path: Path
    names: Names

    @property
    def oom_kills(self) -> int:
        """Return how many processes of it the kernel has killed for want of memory."""
        try:
            lines = (self.path / self.names.events).read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def leaf(self, marker: str, rank: int, limit_bytes: int) -> Group:
        """Make a group of its own for a rank. Raises OSError."""
        leaf = Group(self.path / f"{_PREFIX}{marker}-{rank}", self.names)
        leaf.path.mkdir()
        try:
            if limit_bytes:
                (leaf.path / self.names.limit).write_text(str(limit_bytes))
                name, is_sum = self.names.swap
                with contextlib.suppress(OSError):  # a kernel that doesn't count swap
                    (leaf.path / name).write_text(str(limit_bytes if is_sum else 0))
            if not (leaf.path / self.names.events).exists():
                raise OSError(
                    f"{self.path} counts no memory for its parts; start the daemon in a group of its own, {DAEMONS}"
                )
        except OSError:
            leaf.remove()
            raise
        return leaf

    def add(self, pid: int) -> None:
        """Move a process into it. Raises OSError."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def kill(self) -> None:
        """SIGKILL everything in it, whatever has become of its parents, sessions and environments."""
        with contextlib.suppress(OSError):
            if self.names.kill:
                (self.path / self.names.kill).write_text("1")
                return
            for pid in (self.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), 9)

    def remove(self) -> bool:
        """Remove it; False while there is a process in it."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class Kills:
    """What a group counted in the last moments: a kill that was survived by a second or two was of something else."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._survived = self._sampled = group.oom_kills
        self._sampled_s = time.monotonic()

    def sample(self) -> None:
        """A rank shows life: what was counted at the sample before this one, it has survived."""
        now_s = time.monotonic()
        if now_s - self._sampled_s >= SAMPLE_S:
            self._survived, self._sampled, self._sampled_s = self._sampled, self._group.oom_kills, now_s

    def take(self) -> bool:
        """Return whether one more was killed than had been survived; each one tells of one end."""
        is_new = self._group.oom_kills > self._survived
        self._survived += is_new
        self._sampled = max(self._sampled, self._survived)
        return is_new


def own_group(root: Path = Path("/")) -> Group | None:
    """Return the group whose leaves this process may make, as /proc says; None: no memory is counted here."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        own = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in own:
        _, controllers, path = line.split(":", 2)
        is_v2 = not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        mounted = _mounted(mounts, path, is_v2=is_v2)
        if mounted is None:
            continue
        folder = root / mounted.lstrip("/")
        if is_v2:
            folder = folder.parent if folder.name == DAEMONS else folder
            with contextlib.suppress(OSError):  # its leaves may count memory already, or never; `leaf` says which
                (folder / "cgroup.subtree_control").write_text("+memory")
        if folder.is_dir():
            return Group(folder, V2 if is_v2 else V1)
    return None


def groups_of(marker: str) -> list[Group]:
    """Return the leaves of a shim's ranks that are there."""
    own = own_group()
    if own is None or not marker:
        return []
    return [Group(path, own.names) for path in own.path.glob(f"{_PREFIX}{marker}-*")]


def _mounted(mounts: list[str], path: str, *, is_v2: bool) -> str | None:
    """Return where a group of the hierarchy is mounted."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not (kind[0] == "cgroup2" if is_v2 else kind[0] == "cgroup" and "memory" in kind[2].split(",")):
            continue
        top, where = fields[3], fields[4]
        if path == top or top == "/" or path.startswith(f"{top}/"):
            rest = path[len(top) :] if top != "/" else path
            return f"{where}/{rest.lstrip('/')}".rstrip("/")
    return None
