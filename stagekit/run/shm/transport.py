"""The rings of one rank, in the shape of a c10d backend. Made by stagekit.run.shm.setup."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from stagekit.run.shm.inbox import Inbox
from stagekit.run.shm.outbox import SENT, Outbox
from stagekit.run.shm.ring import PIECE
from stagekit.run.transport import Work

T = TypeVar("T")


class Peers(dict[int, T]):
    """One side of a ring by its peer's rank; empty once the run is closed."""

    def __missing__(self, peer: int) -> T:
        raise RuntimeError("shared memory: this run was closed")


class ShmTransport:
    """The rings of one rank, in the shape of a c10d backend. For the thread that made it."""

    def __init__(self, outboxes: Peers[Outbox], inboxes: Peers[Inbox], timeout_s: float) -> None:
        self._outboxes, self._inboxes, self._timeout_s = outboxes, inboxes, timeout_s

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        (tensor,), outbox = tensors, self._outboxes[peer]
        size = tensor.nbytes
        if size <= PIECE and not outbox.pending and not outbox.lost and outbox.put(tag, size, tensor.data_ptr(), size):
            return SENT
        return outbox.send_in_pieces(tensor, tag, self._timeout_s)

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        return self._inboxes[peer].post(tensors[0], tag)
