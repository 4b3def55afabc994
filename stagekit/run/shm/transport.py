"""The rings of one rank, in the shape of a c10d backend. Made by stagekit.run.shm.setup."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from stagekit.run.shm.inbox import Inbox
from stagekit.run.shm.outbox import Outbox
from stagekit.run.transport import Work

T = TypeVar("T")


class Peers(dict[int, T]):
    """One side of a ring by its peer's rank; empty once the run is closed."""

    def __missing__(self, peer: int) -> T:
        raise RuntimeError("shared memory: this run was closed")


class Way:
    """To and from one rank; not to be used once the run is closed."""

    def __init__(self, outbox: Outbox, inbox: Inbox) -> None:
        self.send, self.recv = outbox.send, inbox.post


class ShmTransport:
    """The rings of one rank. For the thread that made it."""

    def __init__(self, outboxes: Peers[Outbox], inboxes: Peers[Inbox]) -> None:
        self._outboxes, self._inboxes = outboxes, inboxes

    def towards(self, peer: int) -> Way:
        """Return the way to and from that rank."""
        return Way(self._outboxes[peer], self._inboxes[peer])

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work | None:
        return self._outboxes[peer].send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        return self._inboxes[peer].post(tensors, peer, tag)
