"""One attempt's shim as the daemon sees it: start it, connect to it, exchange lines.

The shim is started by exec in a session of its own, so it lives on when this daemon goes. Called by
piped.node.supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping

from piped.lines import LineReader, Message, encode
from piped.node.attempt_dir import AttemptDir

CONNECT_S = 15.0  # a Python start on a busy machine, and some
_RETRY_S = 0.01


class ShimGone(Exception):
    """The attempt's shim does not run (any more)."""


def launch(directory: AttemptDir, base_env: Mapping[str, str], python: str = sys.executable) -> subprocess.Popen[bytes]:
    """Start the attempt's shim; the caller polls the process, else it stays a zombie. Blocks for an exec."""
    argv = [python, "-m", "piped", "shim", "--dir", str(directory.path)]
    argv += ["--fence", str(directory.fence), "--job-id", directory.job_id]
    with (directory.path / "shim.log").open("ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**base_env, "PIPED_SHIM": directory.marker},
            cwd=directory.path,
            start_new_session=True,
        )


class ShimLink:
    """A connection to a shim; closed by `close` or when `messages` ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, directory: AttemptDir, process: subprocess.Popen[bytes] | None) -> ShimLink:
        """Connect to a shim that runs or is about to. Raises ShimGone, or TimeoutError after CONNECT_S."""
        async with asyncio.timeout(CONNECT_S):
            while True:
                folder = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)
                try:  # through /proc/self/fd: an address holds 107 bytes only
                    return cls(*await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/shim.sock"))
                except (FileNotFoundError, ConnectionError):
                    has_ended = process is None or process.poll() is not None
                    if has_ended and not directory.shim_is_alive():
                        raise ShimGone(directory.shim_log_tail()) from None
                finally:
                    os.close(folder)
                await asyncio.sleep(_RETRY_S)

    def send(self, message: Message) -> None:
        """Queue a line. Raises ValueError above the limit of a line; a broken connection shows in `messages`."""
        self._writer.write(encode(message))

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what the shim says until the connection ends."""
        lines = LineReader()
        try:
            while data := await self._reader.read(1 << 18):
                for message in lines.feed(data):
                    yield message
        except ConnectionError:
            return

    async def close(self) -> None:
        """Close the connection; the shim goes on."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
