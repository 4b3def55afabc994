"""shim.sock: the one connection to the node daemon; the newest wins. Standard library only.

Called by piped.shim.supervisor, which owns the selector and decides what to say.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from piped.lines import LineReader, Message, encode
from piped.shim import system

_CHUNK_BYTES = 64 << 10


class Link:
    """The listener and the current connection; both non-blocking."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "shim.sock"
        self.listener = system.listen_in(directory, self._path.name)
        self.connection: socket.socket | None = None
        self._reader = LineReader()
        self._unsent = b""

    def accept(self) -> socket.socket | None:
        """Take a new connection and return it, or None if its peer is another user or already gone.

        The caller drops the old connection first (`drop`) when this returns one; then `adopt` makes it current.
        """
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return None
        connection.setblocking(False)
        if system.peer_uid(connection) not in (0, os.geteuid()):
            connection.close()
            return None
        return connection

    def adopt(self, connection: socket.socket) -> None:
        """Make `connection` the current one."""
        self.connection, self._reader, self._unsent = connection, LineReader(), b""

    def drop(self) -> None:
        """Close the current connection, if any."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    @property
    def is_idle(self) -> bool:
        """Say whether the next message may be handed to `send`."""
        return self.connection is not None and not self._unsent

    @property
    def has_unsent(self) -> bool:
        """Say whether a line is partly sent."""
        return bool(self._unsent)

    def send(self, message: Message) -> bool:
        """Begin to send a line; False when the connection is broken."""
        self._unsent = encode(message)
        return self.flush()

    def flush(self) -> bool:
        """Go on with the line; False when the connection is broken."""
        if self.connection is None:
            return False
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def read(self) -> list[Message] | None:
        """Return what arrived; None when the connection ended or broke the protocol."""
        assert self.connection is not None
        messages: list[Message] = []
        try:
            while len(messages) < 256:
                data = self.connection.recv(_CHUNK_BYTES)
                if not data:
                    return messages or None
                messages += self._reader.feed(data)
        except BlockingIOError:
            return messages
        except (OSError, ValueError):
            return None
        return messages

    def close(self) -> None:
        """Close everything and remove the socket's file."""
        self.drop()
        self.listener.close()
        self._path.unlink(missing_ok=True)
