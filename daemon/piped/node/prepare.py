"""Preparation of an attempt: its directory, room on the disk, the interpreter, the data address, the job's source.

Raises PreparationError with a text for the submitter; starts nothing. Called by piped.node.supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from piped.node.attempt_dir import AttemptDir
from piped.node.model import DesiredAttempt

MIN_FREE_BYTES = 256 << 20
MAX_PACKED_BYTES = 256 << 20  # what the coordinator takes
MAX_UNPACKED_BYTES = 2 << 30
MAX_ENTRIES = 100_000

Download = Callable[[str], AsyncIterator[bytes]]
"""Yields the bytes of an artifact by its sha256; raises OSError when it can't be had."""


class PreparationError(Exception):
    """This node can't run the attempt; the text says why and what to do."""


async def prepare(desired: DesiredAttempt, directory: AttemptDir, data_address: str, download: Download) -> None:
    """Make everything ready for the attempt's shim. May be repeated."""
    await asyncio.to_thread(_check, desired, directory, data_address)
    sha256 = desired.spec.get("source")
    if sha256 and not directory.source.exists():
        await _fetch(str(sha256), directory, download)


def _check(desired: DesiredAttempt, directory: AttemptDir, data_address: str) -> None:
    free = shutil.disk_usage(directory.path).free
    if free < MIN_FREE_BYTES:
        raise PreparationError(
            f"{free >> 20} MiB are free in the node's state directory; {MIN_FREE_BYTES >> 20} MiB are needed for logs "
            "and source; free some space there"
        )
    python = desired.spec.get("python")
    if python and not os.access(str(python), os.X_OK):
        raise PreparationError(
            f"python: {python!r} is no executable file on this node; install it there or leave it out"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(data_address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as error:
        raise PreparationError(
            f"data_address {data_address!r}: workers can't listen there: {error.strerror}; set it to an address of this "
            "machine that the other nodes reach"
        ) from error


async def _fetch(sha256: str, directory: AttemptDir, download: Download) -> None:
    """Download, verify and unpack the source so that it is there whole or not at all."""
    packed, unpacked = directory.path / "source.tar.gz.part", directory.path / "source.part"
    digest, size = hashlib.sha256(), 0
    try:
        with packed.open("wb") as file:
            async with contextlib.aclosing(download(sha256)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    size += len(chunk)
                    if size > MAX_PACKED_BYTES:
                        raise PreparationError(f"source {sha256[:12]}: more than {MAX_PACKED_BYTES >> 20} MiB packed")
                    digest.update(chunk)
                    file.write(chunk)
        if digest.hexdigest() != sha256:
            raise PreparationError(f"source {sha256[:12]}: {size} bytes arrived damaged; submit the job again")
        await asyncio.to_thread(_unpack, packed, unpacked)
        unpacked.rename(directory.source)
    except PreparationError:
        raise
    except Exception as error:  # what somebody packed can break tarfile anywhere: OverflowError, ValueError, zlib.error
        said = str(error) if isinstance(error, (OSError, tarfile.TarError)) else f"{type(error).__name__}: {error}"
        raise PreparationError(f"source {sha256[:12]} can't be fetched or unpacked: {said}; pack it again") from error
    finally:
        packed.unlink(missing_ok=True)
        shutil.rmtree(unpacked, ignore_errors=True)


def _unpack(packed: Path, target: Path) -> None:
    """Extract with bounds; names and links that leave `target` are refused by the "data" filter (PEP 706)."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)
    size = 0
    with tarfile.open(packed, "r|gz") as archive:
        for number, member in enumerate(archive):
            size += max(0, member.size)
            if number >= MAX_ENTRIES or size > MAX_UNPACKED_BYTES:
                raise PreparationError(
                    f"the source holds more than {MAX_ENTRIES} entries or {MAX_UNPACKED_BYTES >> 20} MiB; leave data "
                    "out of it"
                )
            archive.extract(member, target, filter="data")
