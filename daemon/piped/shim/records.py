"""What of a rank survives a crash: `ranks/<r>/started` and `ranks/<r>/exit.json`. Standard library only.

`started` is on disk before the exec, so that a started rank is never started again; `exit.json` appears whole or not
at all. The node daemon reads both (piped.node.attempt_dir), also when no shim is left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def claim_directory(directory: Path, content: dict[str, Any]) -> None:
    """Create shim.json, durably: from now on this attempt had its shim. Raises FileExistsError for a second one."""
    _write_new(directory / "shim.json", content)


def mark_started(rank_dir: Path, content: dict[str, Any]) -> None:
    """Create `started`, durably. Raises FileExistsError when the rank was started before."""
    rank_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_new(rank_dir / "started", content)
    _sync_directory(rank_dir.parent)


def write_exit(rank_dir: Path, content: dict[str, Any]) -> None:
    """Put exit.json in place, durably."""
    temporary = rank_dir / ".exit.json.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(rank_dir / "exit.json")
    _sync_directory(rank_dir)


def _write_new(path: Path, content: dict[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
