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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeapi import jobproto, jobspec
from pipeapi.mistakes import SpecError
from pipeapi.schedules import is_file
from pipeapi.v1 import spec_pb2
from pipectl import output
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
        csv = _schedule_text(path, job)
        spec = jobproto.to_proto(job, environ=os.environ, source_sha256=sha256, schedule_csv=csv)
        return Loaded(path, spec, source, archive)
    except SpecError as error:
        raise CommandError(str(error), Exit.USAGE) from None


def _schedule_text(path: str, job: jobspec.JobFile) -> str:
    """Return the text of a schedule file, which is looked for beside the job file; "" for a schedule that has a name.

    Raises CommandError, with the lists as a grid and an arrow at the action, for one that can't run.
    """
    schedule = job.pipeline.schedule
    if not is_file(schedule):
        return ""
    file, place = Path(path).parent / schedule, jobspec.locate(path, "pipeline.schedule")
    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        raise CommandError(
            f"pipeline.schedule: can't read {file}: {getattr(error, 'strerror', None) or error} ({place})", Exit.USAGE
        ) from None
    command = [sys.executable, "-m", "stagekit.plan", "--load", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandError(f"pipeline.schedule: {done.stderr.strip()} ({place})", Exit.USAGE)
    if unfit := jobspec.schedule_misfit(job, text):
        raise CommandError(f"{unfit[0]}: {unfit[1]} ({jobspec.locate(path, unfit[0])})", Exit.USAGE)
    return text


def _source_dir(path: str, source: str | None) -> Path | None:
    if source is None:
        return None
    named = Path(path).parent / source
    try:
        folder = named.resolve()
        if folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a NUL character, a loop of links
        raise CommandError(f"source: can't read {str(named)!r} ({path}): {error}", Exit.USAGE) from None
    raise CommandError(f"source: {folder} is no folder ({path})", Exit.USAGE)


def pack(folder: Path) -> bytes:
    """Return `folder` as a tar.gz whose bytes depend on its content alone; links are packed as what they lead to.

    Raises CommandError above the limit, for a link that leads out of the folder, and for what can't be read.
    """
    buffer = io.BytesIO()
    total = 0
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in _files(folder, folder, (folder.resolve(),)):
            try:
                with file.open("rb") as stream:
                    info = tarfile.TarInfo(file.relative_to(folder).as_posix())
                    info.size, info.mode = os.fstat(stream.fileno()).st_size, 0o644
                    total += info.size
                    if total > MAX_SOURCE_BYTES:
                        raise CommandError(
                            f"source: {folder} holds more than {MAX_SOURCE_BYTES >> 20} MiB",
                            Exit.USAGE,
                            "name a folder that holds code only",
                        )
                    tar.addfile(info, stream)
            except OSError as error:
                raise _unreadable(file, error) from None
    return gzip.compress(buffer.getvalue(), mtime=0)


def _files(root: Path, folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files under `folder` in a fixed order and through the links that stay in `root`.

    `above`: the real folders from `root` down to this one, links followed; none may come again.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from None
    for entry in entries:
        if entry.name in _SKIPPED:
            continue
        try:
            if entry.is_symlink():
                _check_link(root, entry, above)
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError as error:
            raise _unreadable(entry, error) from None
        if is_folder:
            yield from _files(root, entry, (*above, entry.resolve()))
        elif is_file:
            yield entry


def _check_link(root: Path, link: Path, above: tuple[Path, ...]) -> None:
    """Raise CommandError for a link with which the nodes would get something else than is here."""
    problem = ""
    try:
        target = link.resolve(strict=True)
    except (FileNotFoundError, RuntimeError):  # RuntimeError: a loop of links
        problem = "leads nowhere"
    else:
        if not target.is_relative_to(above[0]):
            problem = f"leads out of it, to {target}"
        elif target in above:
            problem = "leads to a folder that holds the link itself"
    if problem:
        raise CommandError(
            f"source: the link {link.relative_to(root)} in {root} {problem}",
            Exit.USAGE,
            "replace it by what it stands for, or remove it: the nodes get this folder alone",
        )


def _unreadable(path: Path, error: OSError) -> CommandError:
    return CommandError(
        f"source: can't read {path}: {error.strerror or error}",
        Exit.USAGE,
        "make it readable, or move it out of the source folder",
    )


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
        command, input=json.dumps(jobproto.to_dict(loaded.spec)), capture_output=True, text=True, env=environment
    )
    if done.returncode != 0 or not done.stdout:
        raise CommandError(
            f"planning {loaded.path} ended with status {done.returncode}:\n{done.stderr[-4000:]}", Exit.USAGE
        )
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not document["ok"]:
        where = f"; raised at {document['where']}" if document["where"] else ""
        whole = "\n" + document["traceback"] if traceback else ""
        hint = "" if traceback else f"pipectl plan {loaded.path} --traceback, with the same --set, shows all of it"
        place = jobspec.locate(loaded.path, document["field"])
        raise CommandError(f"{document['field']}: {document['error']}{where} ({place}){whole}", Exit.USAGE, hint)
    for warning in document["warnings"]:
        output.note(f"warning: {output.safe(warning)}")
    return document
