"""What goes to one rank through shared memory: where a message's pieces lie in the ring, and what waits for room.

Used by the caller's thread (`ShmTransport`) and the helper's; which of them may write is decided by `Outbox.pending`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from stagekit.run.shm.ring import (
    ASLEEP,
    CAPACITY,
    FIRST_SLOT,
    FREED,
    LEFT,
    PIECE,
    RECEIVER_LEFT,
    SLOTS,
    STALLED,
    WRITTEN,
    Ring,
    memmove,
)
from stagekit.run.transport import Work

LARGE = 1 << 20  # bytes; above, a helper's wake-up costs less than the copy that it saves the caller


class Sending:
    """A message on its way into the ring; its tensor stays alive with it."""

    def __init__(self, tensor: Tensor, tag: int, timeout_s: float) -> None:
        self.tensor, self.tag, self.size, self.put = tensor, tag, tensor.nbytes, 0
        self.address = tensor.data_ptr()
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._failure: str | None = None

    def is_completed(self) -> bool:
        return self._over.is_set() and self._failure is None

    def wait(self) -> None:
        """Block until all of it is in the ring. Raises RuntimeError."""
        if not self._over.wait(self._timeout_s):
            raise RuntimeError(f"shared memory: nobody made room for a message within {self._timeout_s:.0f} s")
        if self._failure is not None:
            raise RuntimeError(f"shared memory: {self._failure}")

    def end(self, failure: str | None = None) -> None:
        """Say that it is over."""
        self._failure = failure
        self._over.set()


class Outbox:
    """What goes to one rank. While `pending` holds anything the ring is the helper's, else the caller's."""

    def __init__(
        self, ring: Ring, call_helper: Callable[[], None], call_peer: Callable[[], None], timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self.ring, self._call_helper, self._call_peer = ring, call_helper, call_peer
        self._words, self._data = ring.words, ring.data
        self.pending: deque[Sending] = deque()
        self.lost: str | None = None
        self._written = self._tail = 0
        self._starts = [0] * SLOTS  # where the piece in each slot lies

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work | None:
        """Send the one tensor; `peer` is this outbox's, see Transport.send. Raises RuntimeError."""
        (tensor,) = tensors
        size = tensor.nbytes
        if size <= PIECE and not self.pending and not self.lost and self.put(tag, size, tensor.data_ptr(), size):
            return None
        return self._send_in_pieces(tensor, tag)

    def put(self, tag: int, total: int, address: int, size: int) -> bool:
        """Copy one piece of a message of `total` bytes in; say whether there was room."""
        words, written = self._words, self._written
        freed, step = words[FREED], (size + 63) & -64 or 64
        start = 0
        if freed != written:
            if written - freed == SLOTS:
                return False
            start, oldest = self._tail, self._starts[freed % SLOTS]
            if start > oldest and start + step > CAPACITY:
                start = 0
            if start <= oldest and start + step >= oldest:  # equal would look like empty
                return False
        memmove(self._data + start, address, size)
        slot = written % SLOTS
        self._starts[slot], self._tail = start, start + step
        at = FIRST_SLOT + slot * 4
        words[at], words[at + 1], words[at + 2] = tag, total, start
        words[WRITTEN] = self._written = written + 1
        if words[ASLEEP]:
            self.ring.wake()
        return True

    def _send_in_pieces(self, tensor: Tensor, tag: int) -> Work | None:
        """Send a message of several pieces, or one that must queue. Raises RuntimeError."""
        if self.lost is not None:
            raise RuntimeError(f"shared memory: {self.lost}")
        sending = Sending(tensor, tag, self._timeout_s)
        if not self.pending and sending.size <= LARGE:
            while self._put_piece(sending):
                if sending.put == sending.size:
                    return None
        self.pending.append(sending)
        self._call_helper()  # also where there were some: it may have found none left just before
        return sending

    def _put_piece(self, sending: Sending) -> bool:
        """Bring in the next piece of a message; say whether there was room."""
        here = min(PIECE, sending.size - sending.put)
        if not self.put(sending.tag, sending.size, sending.address + sending.put, here):
            return False
        sending.put += here
        return True

    def push(self) -> None:
        """Bring in what pends, as far as there is room. Called by the helper only."""
        words = self._words
        if self.lost is not None:  # and a send has queued since
            self.fail(self.lost)
        while self.pending:
            sending = self.pending[0]
            if not self._put_piece(sending):
                if words[STALLED]:
                    if words[RECEIVER_LEFT]:
                        self.fail(LEFT)
                    return
                self.ring.announce(STALLED)  # who frees from now on calls; one more look for room
            elif sending.put == sending.size:
                words[STALLED] = 0
                self.pending.popleft()
                sending.end()
            self._call_peer()  # there is something to take, and it may be posted for

    def fail(self, why: str) -> None:
        """The receiver is gone: end everything. Called by the helper only."""
        self.lost = why
        while self.pending:
            self.pending.popleft().end(why)
