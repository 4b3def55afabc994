"""`attempts/<fence>/` on disk: what a daemon that comes back can know without asking anyone.

attempt.json (who) · prepare_failed (why) · shim.json, shim.sock, shim.log (piped.shim) · source/ ·
ranks/<r>/started, exit.json, log, log.1 (piped.shim), trace.jsonl, steps.jsonl, plan.json (the worker) ·
closed (the coordinator knows all of it). Called by piped.node.supervisor and piped.node.logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piped.cgroup import groups_of
from piped.node.state import boot_id, replace_json


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """One attempt's directory and its readers."""

    path: Path
    fence: int

    @classmethod
    def create(cls, attempts: Path, fence: int, job_id: str) -> AttemptDir:
        """Make the directory, or take the one that is there. Raises OSError."""
        made = cls(attempts / str(fence), fence)
        (made.path / "ranks").mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (made.path / "attempt.json").exists():
            content = {"fence": fence, "job_id": job_id, "marker": str(uuid.uuid4())}
            replace_json(made.path / "attempt.json", content, durable=True)
        return made

    @property
    def job_id(self) -> str:
        """Return whose attempt this is."""
        return str(self._read("attempt.json").get("job_id", ""))

    @property
    def marker(self) -> str:
        """Return the value of PIPED_SHIM in the environment of every process of this attempt."""
        return str(self._read("attempt.json").get("marker", ""))

    @property
    def had_shim(self) -> bool:
        """Say whether a shim was ever here; then no second one may be started."""
        return (self.path / "shim.json").exists()

    def shim_is_alive(self) -> bool:
        """Say whether the shim's process, and not a later one with its pid, is there and no zombie."""
        shim = self._read("shim.json")
        if not shim or shim.get("boot_id") != boot_id():
            return False
        try:
            text = Path(f"/proc/{shim['pid']}/stat").read_text(errors="replace")
        except OSError:
            return False
        fields = text[text.rfind(")") + 2 :].split()
        return fields[0] not in "ZX" and int(fields[19]) == shim.get("starttime")

    def started_ranks(self) -> frozenset[int]:
        """Return the ranks that were ever started."""
        return frozenset(int(path.parent.name) for path in (self.path / "ranks").glob("*/started"))

    def exit_records(self) -> dict[int, dict[str, Any]]:
        """Return the exit records by rank."""
        return {
            int(path.parent.name): record
            for path in (self.path / "ranks").glob("*/exit.json")
            if (record := _load(path))
        }

    @property
    def preparation_error(self) -> str | None:
        """Return why the preparation failed, if it did."""
        file = self.path / "prepare_failed"
        return file.read_text() if file.exists() else None

    def note_preparation_error(self, message: str) -> None:
        """Remember why the preparation failed; best effort, since a full disk may be the reason."""
        with contextlib.suppress(OSError):
            (self.path / "prepare_failed").write_text(message)

    @property
    def is_closed(self) -> bool:
        """Say whether nothing of this attempt is left to report."""
        return (self.path / "closed").exists()

    def close(self) -> None:
        """Note that the coordinator knows everything of this attempt."""
        with contextlib.suppress(OSError):
            (self.path / "closed").touch()

    @property
    def source(self) -> Path:
        """Return where the job's source folder is unpacked."""
        return self.path / "source"

    def rank_dir(self, rank: int) -> Path:
        """Return where one rank's files are."""
        return self.path / "ranks" / str(rank)

    def shim_log_tail(self) -> str:
        """Return what the shim said about itself."""
        try:
            return (self.path / "shim.log").read_text(errors="replace")[-2000:].strip()
        except OSError:
            return ""

    def _read(self, name: str) -> dict[str, Any]:
        return _load(self.path / name)


def list_attempts(attempts: Path) -> list[AttemptDir]:
    """Return the attempts on disk, by fence."""
    fences = sorted(int(path.name) for path in attempts.iterdir() if path.name.isdigit())
    return [AttemptDir(attempts / str(fence), fence) for fence in fences]


def remove_old(attempts: Path, keep: int) -> list[int]:
    """Remove closed attempts but the newest `keep`; return their fences."""
    closed = [attempt for attempt in list_attempts(attempts) if attempt.is_closed]
    for attempt in closed[:-keep]:
        shutil.rmtree(attempt.path, ignore_errors=True)
    return [attempt.fence for attempt in closed[:-keep]]


def kill_marked(marker: str) -> int:
    """SIGKILL every live process whose environment holds PIPED_SHIM=`marker`, or whose cgroup is one of its ranks'.

    Return how many there were.
    """
    if not marker:  # attempt.json is gone: nothing tells its processes from another's
        return 0
    wanted, count = f"PIPED_SHIM={marker}".encode(), 0
    for group in groups_of(marker):  # of ranks whose shim could not remove them
        group.kill()
        count += not group.remove()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's; a zombie's environment is empty
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                count += 1
    return count


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
