"""Files that clients upload and nodes fetch: named by their SHA-256, whole or absent.

The bytes lie under the state directory; that a file exists is decided by the directory, that it was ever stored is in
the state. `services` checks a spec's source here.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from pipeapi.v1 import jobs_pb2, jobs_pb2_grpc
from piped.coordinator.engine import Engine
from piped.core.events import ArtifactStored
from piped.core.specs import SHA256
from piped.errors import FieldViolation, NotFoundError, SpecError, TooLargeError, UnavailableError, UserError

MAX_BYTES = 256 * 1024 * 1024
CHUNK_BYTES = 256 * 1024
PARTIAL = ".part-"


class ArtifactFiles:
    """The directory of artifacts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for rest in directory.glob(f"{PARTIAL}*"):  # of uploads that an earlier process did not finish
            rest.unlink()

    def path(self, sha256: str) -> Path:
        """Return where the file of that hash lies, present or not. Raises UserError for what is no hash."""
        if not SHA256.fullmatch(sha256):
            raise UserError(f"{sha256!r} is no SHA-256 in lower-case hexadecimal")
        return self._directory / sha256

    def require(self, sha256: str) -> None:
        """Raise SpecError when a spec names a source that was not uploaded."""
        if sha256 and not self.path(sha256).is_file():
            raise SpecError(
                (FieldViolation("source", f"no artifact {sha256} was uploaded; upload it before submitting"),)
            )

    def begin(self) -> tuple[Path, BinaryIO]:
        """Return a new partial file, open for writing."""
        partial = self._directory / f"{PARTIAL}{uuid.uuid4()}"
        return partial, partial.open("xb")

    def keep(self, partial: Path, file: BinaryIO, sha256: str) -> None:
        """Make the partial file durable under its hash."""
        file.flush()
        os.fsync(file.fileno())
        partial.replace(self.path(sha256))
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ArtifactService(jobs_pb2_grpc.ArtifactServiceServicer):
    """Has, Upload, Download."""

    def __init__(self, engine: Engine, files: ArtifactFiles) -> None:
        self._engine, self._files = engine, files

    async def Has(self, request: jobs_pb2.HasRequest, _context: object) -> jobs_pb2.HasResponse:
        return jobs_pb2.HasResponse(present=self._files.path(request.sha256).is_file())

    async def Upload(
        self, requests: AsyncIterator[jobs_pb2.UploadRequest], _context: object
    ) -> jobs_pb2.UploadResponse:
        """Store the stream under the hash that its first message names, if it has that hash."""
        partial, file = await asyncio.to_thread(self._files.begin)
        try:
            with file:
                sha256, size_bytes = await _receive(requests, file)
                self._files.path(sha256)
                await asyncio.to_thread(self._files.keep, partial, file, sha256)
        except OSError as error:
            raise UnavailableError(f"the upload can't be written ({error}); free space on the coordinator") from error
        finally:
            partial.unlink(missing_ok=True)
        await self._engine.post(ArtifactStored(sha256, size_bytes))
        return jobs_pb2.UploadResponse(sha256=sha256, size_bytes=size_bytes)

    async def Download(
        self, request: jobs_pb2.DownloadRequest, _context: object
    ) -> AsyncIterator[jobs_pb2.DownloadResponse]:
        """Send the file in chunks."""
        path = self._files.path(request.sha256)
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:
            raise NotFoundError(f"no artifact {request.sha256}; it was never uploaded here") from None
        with file:
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield jobs_pb2.DownloadResponse(data=data)


async def _receive(requests: AsyncIterator[jobs_pb2.UploadRequest], file: BinaryIO) -> tuple[str, int]:
    """Write the stream into `file`; return its hash, which is checked, and its size."""
    digest, promised, size_bytes = hashlib.sha256(), "", 0
    async for request in requests:
        promised = promised or request.sha256
        size_bytes += len(request.data)
        if size_bytes > MAX_BYTES:
            raise TooLargeError(f"the upload is larger than {MAX_BYTES} bytes; leave data out of the source folder")
        digest.update(request.data)
        await asyncio.to_thread(file.write, request.data)
    if digest.hexdigest() != promised:
        raise UserError(
            f"the {size_bytes} bytes received have SHA-256 {digest.hexdigest()}, not {promised}; send again"
        )
    return promised, size_bytes
