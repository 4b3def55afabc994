"""A job file on its way to the coordinator: load, check its program here if torch is there, pack its source."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeapi import jobspec
from pipeapi.mistakes import SpecError
from pipeapi.v1 import spec_pb2
from pipectl.errors import CommandError, Exit

MAX_SOURCE_BYTES = 64 << 20
_SKIPPED = {".git", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A job file, ready to submit."""

    path: str
    spec: spec_pb2.JobSpec
    source: Path | None
    archive: bytes | None


def load(path: str, sets: Sequence[str] = (), envs: Sequence[str] = ()) -> Loaded:
    """Read and check a job file. `envs` are "K=V", or "K" to take it from this environment."""
    env_sets = []
    for item in envs:
        name, equals, value = item.partition("=")
        env_sets.append(f"env.{name}={json.dumps(value) if equals else 'null'}")
    try:
        job = jobspec.load_file(path, [*sets, *env_sets])
        source = _source_dir(path, job.source)
        archive = pack(source) if source else None
        sha256 = hashlib.sha256(archive).hexdigest() if archive else ""
        return Loaded(path, jobspec.to_proto(job, environ=os.environ, source_sha256=sha256), source, archive)
    except SpecError as error:
        raise CommandError(str(error), Exit.USAGE) from None


def _source_dir(path: str, source: str | None) -> Path | None:
    if source is None:
        return None
    folder = (Path(path).parent / source).resolve()
    if not folder.is_dir():
        raise CommandError(f"source: {folder} is no folder ({path})", Exit.USAGE)
    return folder


def pack(folder: Path) -> bytes:
    """Return `folder` as a tar.gz whose bytes depend on its content alone. Raises CommandError above the limit."""
    buffer = io.BytesIO()
    total = 0
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in sorted(folder.rglob("*")):
            relative = file.relative_to(folder)
            if _SKIPPED & set(relative.parts) or file.is_symlink() or not file.is_file():
                continue
            total += file.stat().st_size
            if total > MAX_SOURCE_BYTES:
                raise CommandError(
                    f"source: {folder} holds more than {MAX_SOURCE_BYTES >> 20} MiB",
                    Exit.USAGE,
                    "name a folder that holds code only",
                )
            info = tarfile.TarInfo(relative.as_posix())
            info.size, info.mode = file.stat().st_size, 0o644
            with file.open("rb") as stream:
                tar.addfile(info, stream)
    return gzip.compress(buffer.getvalue(), mtime=0)


def has_torch() -> bool:
    """Return whether this interpreter could plan a job."""
    return importlib.util.find_spec("torch") is not None


def describe(loaded: Loaded, *, quick: bool, traceback: bool = False) -> dict[str, Any]:
    """Build, capture, cut and schedule the job in a process of its own; return the document of stagekit.describe.

    Raises CommandError for a program that can't be imported, captured or cut.
    """
    command = [sys.executable, "-m", "stagekit.describe", *(["--quick"] if quick else [])]
    if loaded.source:
        command += ["--source", str(loaded.source)]
    environment = {**os.environ, **dict(loaded.spec.env)}
    done = subprocess.run(
        command, input=json.dumps(jobspec.to_dict(loaded.spec)), capture_output=True, text=True, env=environment
    )
    if done.returncode != 0 or not done.stdout:
        raise CommandError(
            f"planning {loaded.path} ended with status {done.returncode}:\n{done.stderr[-4000:]}", Exit.USAGE
        )
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not document["ok"]:
        where = f" ({document['where']})" if document["where"] else ""
        whole = "\n" + document["traceback"] if traceback else ""
        hint = "" if traceback else f"pipectl plan {loaded.path} --traceback shows all of it"
        raise CommandError(
            f"{loaded.path}: program {loaded.spec.program}: {document['error']}{where}{whole}", Exit.USAGE, hint
        )
    return document
