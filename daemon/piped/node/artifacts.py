"""Source archives from the coordinator's ArtifactService: the rpc edge of piped.node.prepare."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from pipeapi.v1 import jobs_pb2, jobs_pb2_grpc
from piped.node.prepare import Download

_DOWNLOAD_S = 600.0


def downloader(channel: grpc.aio.Channel) -> Download:
    """Return a function that yields an artifact's bytes over `channel`; it raises OSError when it can't be had."""
    stub: Any = jobs_pb2_grpc.ArtifactServiceStub(channel)

    async def download(sha256: str) -> AsyncIterator[bytes]:
        call = stub.Download(jobs_pb2.DownloadRequest(sha256=sha256), timeout=_DOWNLOAD_S)
        try:
            async for part in call:
                yield part.data
        except grpc.aio.AioRpcError as error:
            raise OSError(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()

    return download
