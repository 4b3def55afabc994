"""The worker's end of the socketpair to its shim: JSON lines both ways (piped.lines).

Sending never blocks training: a thread of its own writes, and a metrics snapshot that was not sent yet is replaced by
the next. Used by main and train.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from piped import lines

FLUSH_S = 5.0


class ShimGone(Exception):
    """The shim closed the link before it said what was waited for."""


class Link:
    """Messages to and from the shim. `send` is safe from any thread; `receive` belongs to one."""

    def __init__(self, descriptor: int, on_gone: Callable[[], None] = lambda: None) -> None:
        """`on_gone` is called from a thread when the shim is gone."""
        self._on_gone = on_gone
        self._socket = socket.socket(fileno=descriptor)
        self._outbox: deque[lines.Message] = deque()
        self._changed = threading.Condition()
        self._is_idle = True
        self._inbox: queue.SimpleQueue[lines.Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="link-writer", daemon=True).start()
        threading.Thread(target=self._read, name="link-reader", daemon=True).start()

    @classmethod
    def from_environment(cls, on_gone: Callable[[], None]) -> Link:
        """Open the link whose descriptor the shim put into PIPED_FD; children do not inherit it."""
        descriptor = int(os.environ.pop("PIPED_FD"))
        os.set_inheritable(descriptor, False)
        return cls(descriptor, on_gone)

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message; returns at once."""
        with self._changed:
            if kind == "metrics":
                self._outbox = deque(m for m in self._outbox if m["type"] != "metrics")
            self._outbox.append({"type": kind, **fields})
            self._changed.notify_all()

    def receive(self, kind: str, timeout_s: float | None = None) -> lines.Message:
        """Wait for the next message of this kind; others are dropped. Raises ShimGone or queue.Empty."""
        while True:
            message = self._inbox.get(timeout=timeout_s)
            if message is None:
                raise ShimGone(f"the shim closed the link while {kind!r} was awaited")
            if message["type"] == kind:
                return message

    def flush(self) -> None:
        """Wait until everything queued was written, at most FLUSH_S."""
        with self._changed:
            self._changed.wait_for(lambda: not self._outbox and self._is_idle, timeout=FLUSH_S)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._outbox))
                message = self._outbox.popleft()
                self._is_idle = False
            with contextlib.suppress(OSError):  # a dead shim ends this process by PDEATHSIG
                self._socket.sendall(lines.encode(message))

    def _read(self) -> None:
        reader = lines.LineReader()
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._inbox.put(None)
                self._on_gone()
                return
            for message in reader.feed(data):
                self._inbox.put(message)
