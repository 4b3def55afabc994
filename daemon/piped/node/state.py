"""The node's state directory: who this node is, which cluster it belongs to, that only one daemon uses it.

Layout: `lock` (flocked, holds the daemon's pid), `node_id`, `cluster.json`, `endpoints.json`, `attempts/<fence>/`
(piped.node.attempt_dir). Built by piped.node.app; everything small is replaced whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class StateError(Exception):
    """The state directory can't be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What the node remembers of its cluster, to notice another cluster or a coordinator with an older store."""

    cluster_id: str = ""
    highest_epoch: int = 0
    highest_fence: int = 0


class StateDir:
    """An open, locked state directory. Raises StateError when it can't be locked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"state_dir {path}: {error.strerror}; choose a local directory of this user") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise StateError(
                f"state_dir {path}: the node daemon with pid {holder or 'unknown'} uses it; stop that one, or give "
                "this one another --state-dir and --name"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self.attempts = path / "attempts"
        self.attempts.mkdir(exist_ok=True, mode=0o700)
        self._writing = threading.Lock()
        self.node_id = self._node_id()
        self.membership = self._membership()

    def close(self) -> None:
        """Give the directory up."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "endpoints.json").unlink()
        os.close(self._lock)

    @property
    def host_key(self) -> str:
        """Return what tells two daemons with the same node_id apart: the boot and the directory itself."""
        folder = self.path.stat()
        return f"{boot_id()} {folder.st_dev}:{folder.st_ino}"

    def remember(self, *, cluster_id: str = "", epoch: int = 0, fence: int = 0) -> None:
        """Note, durably, what is new of this; numbers only rise. Blocks on the disk; may be called from any thread."""
        with self._writing:
            old = self.membership
            new = Membership(cluster_id or old.cluster_id, max(epoch, old.highest_epoch), max(fence, old.highest_fence))
            if new != old:
                replace_json(self.path / "cluster.json", asdict(new), durable=True)
                self.membership = new

    def publish_endpoints(self, *, metrics: str, health: str | None) -> None:
        """Write where this daemon listens: ports may have been 0."""
        replace_json(self.path / "endpoints.json", {"metrics": metrics, "health": health, "pid": os.getpid()})

    def _node_id(self) -> str:
        file = self.path / "node_id"
        try:
            return str(uuid.UUID(file.read_text().strip()))
        except FileNotFoundError:
            node_id = str(uuid.uuid4())
            _replace(file, node_id + "\n", durable=True)
            return node_id
        except ValueError as error:
            raise StateError(f"{file} holds no UUID; restore it, or remove it to register as a new node") from error

    def _membership(self) -> Membership:
        file = self.path / "cluster.json"
        try:
            return Membership(**json.loads(file.read_text()))
        except FileNotFoundError:
            return Membership()
        except (ValueError, TypeError) as error:
            raise StateError(f"{file} is damaged ({error}); remove it to join a cluster anew") from error


def boot_id() -> str:
    """Return the identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def replace_json(path: Path, content: dict[str, Any], *, durable: bool = False) -> None:
    """Put `content` at `path`: readers see the old or the new file, whole."""
    _replace(path, json.dumps(content), durable=durable)


def _replace(path: Path, text: str, *, durable: bool) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.rename(path)
