"""`piped shim`: takes the attempt's directory for good and supervises its workers until the daemon dismisses it.

Standard library only and everything imported here, at start: a shim must not need the disk or a new package later.
Started by the node daemon with a session of its own; called by piped.__main__.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from piped.shim import records, system
from piped.shim.supervisor import Supervisor


def run(directory: Path, fence: int, job_id: str) -> int:
    """Supervise the attempt in `directory`; return 0 after an orderly end, 1 if it had a shim before."""
    directory = directory.absolute()
    marker = os.environ.get("PIPED_SHIM", "")
    identity = {"pid": os.getpid(), "starttime": system.starttime(os.getpid()), "marker": marker, "job_id": job_id}
    system.become_subreaper()
    try:
        records.claim_directory(directory, identity | {"fence": fence, "boot_id": _boot_id()})
    except FileExistsError:
        print(f"piped shim: {directory} had its shim; an attempt never gets a second one", file=sys.stderr)
        return 1
    Supervisor(directory, fence=fence, job_id=job_id, marker=marker, base_env=dict(os.environ)).run()
    return 0


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
