"""Preparation of an attempt: what piped.node.preflight checks, and the job's source.

Raises PreparationError with a text for the submitter; starts nothing. Built by piped.node.app, called by piped.node.supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from piped.node.attempt_dir import AttemptDir
from piped.node.model import DesiredAttempt
from piped.node.orders import Place
from piped.node.preflight import PreflightError, Wires, check

MAX_PACKED_BYTES = 256 << 20  # what the coordinator takes
MAX_UNPACKED_BYTES = 2 << 30
MAX_ENTRIES = 100_000

Download = Callable[[str], AsyncIterator[bytes]]
"""Yields the bytes of an artifact by its sha256; raises OSError when it can't be had."""


class PreparationError(PreflightError):
    """The job's source can't be had; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What prepares attempts on this node."""

    place: Place
    wires: Wires
    download: Download
    min_free_bytes: int

    async def prepare(self, desired: DesiredAttempt, directory: AttemptDir) -> None:
        """Make everything ready for the attempt's shim. May be repeated. Raises PreflightError."""
        await check(desired, directory.path, self.place, self.wires, min_free_bytes=self.min_free_bytes)
        sha256 = desired.spec.get("source")
        if sha256 and not directory.source.exists():
            await _fetch(str(sha256), directory, self.download)


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
        await asyncio.to_thread(shutil.rmtree, unpacked, ignore_errors=True)


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
