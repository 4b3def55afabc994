"""CPU ranks of one host exchange tensors through shared memory, in the shape and with the meaning of gloo's transfers.

A send copies its tensor into the ring of its receiver and is over; the receiver copies it out when it waits for it, or for
a later one, into the tensor that was posted for its tag, or aside. All of that happens in the caller's thread. What finds
no room in the ring is left to a helper thread, which sleeps until then (stagekit.run.shm_helper): a send never blocks, and
what was posted for arrives whatever the caller does meanwhile, as with gloo. Matching and order per tag are decided here;
the memory is stagekit.run.shm_ring's. Made by stagekit.run.shm_setup.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

import torch
from torch import Tensor

from stagekit.run.shm_ring import (
    ASLEEP,
    CAPACITY,
    FREED,
    PIECE,
    RECEIVER_LEFT,
    SENDER_LEFT,
    SLOT,
    SLOTS,
    STALLED,
    WRITTEN,
    Ring,
    memmove,
)
from stagekit.run.transport import Work

LEFT = "the other side ended its run"
_pack, _unpack = SLOT.pack_into, SLOT.unpack_from


class Sent:
    """A message that is in the ring: its tensor may be used again."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


SENT = Sent()


class Sending:
    """A message that found no room; its sender's helper brings the rest of it in. Its tensor stays alive with it."""

    def __init__(self, tensor: Tensor, tag: int, put: int, timeout_s: float) -> None:
        self.tensor, self.tag, self.size, self.put = tensor, tag, tensor.nbytes, put
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

    def __init__(self, ring: Ring, call_helper: Callable[[], None], call_peer: Callable[[], None]) -> None:
        self.ring, self._call_helper, self._call_peer = ring, call_helper, call_peer
        self._words, self._map, self._slots, self._data = ring.words, ring.map, ring.slots, ring.data
        self.pending: deque[Sending] = deque()
        self.lost: str | None = None
        self._written = self._tail = 0
        self._starts = [0] * SLOTS  # where the piece in each slot lies

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
        slot = written % SLOTS
        _pack(self._map, self._slots + slot * 32, tag, total, start, size)
        memmove(self._data + start, address, size)
        self._starts[slot], self._tail = start, start + step
        words[WRITTEN] = self._written = written + 1
        if words[ASLEEP]:
            self.ring.wake()
        return True

    def send_in_pieces(self, tensor: Tensor, tag: int, timeout_s: float) -> Work:
        """Send a message that is large, or must queue: as much as there is room for at once. Raises RuntimeError."""
        if self.lost is not None:
            raise RuntimeError(f"shared memory: {self.lost}")
        put = 0
        if not self.pending:
            put = self._put_pieces(tag, tensor.nbytes, tensor.data_ptr(), 0)
            if put < 0:
                return SENT
        sending = Sending(tensor, tag, put, timeout_s)
        self.pending.append(sending)
        self._call_helper()  # also where there were some: it may have found none left just before
        return sending

    def _put_pieces(self, tag: int, total: int, address: int, put: int) -> int:
        """Bring in what comes after `put` bytes; return how many are in, or -1 when all are."""
        while self.put(tag, total, address + put, min(PIECE, total - put)):
            put += PIECE
            if put >= total:
                return -1
        return put

    def push(self) -> None:
        """Bring in what pends, as far as there is room. Called by the helper only."""
        while self.pending:
            sending, is_new = self.pending[0], not self._words[STALLED]
            if is_new:
                self.ring.announce(STALLED)  # who frees from now on calls
            put = self._put_pieces(sending.tag, sending.size, sending.address, sending.put)
            if put >= 0:
                if put != sending.put or is_new:
                    self._call_peer()  # there is something to take, and it may be posted for
                sending.put = put
                if self._words[RECEIVER_LEFT]:
                    self.fail(LEFT)
                return
            self._words[STALLED] = 0
            self.pending.popleft()
            sending.end()

    def fail(self, why: str) -> None:
        """The receiver is gone: end everything. Called by the helper only."""
        self.lost = why
        while self.pending:
            self.pending.popleft().end(why)


class Received:
    """A posted receive; its tensor stays alive with it."""

    __slots__ = ("_inbox", "address", "done", "failure", "following", "got", "size", "tensor")

    def __init__(self, inbox: Inbox, tensor: Tensor) -> None:
        self._inbox, self.tensor = inbox, tensor
        self.address, self.size, self.got = tensor.data_ptr(), tensor.nbytes, 0
        self.done, self.failure = False, ""
        self.following: Received | None = None  # posted later for the same tag

    def is_completed(self) -> bool:
        return self.done and not self.failure

    def wait(self) -> None:
        """Block until the message is in the tensor. Raises RuntimeError."""
        if not self.done:
            self._inbox.wait_for(self)
        if self.failure:
            raise RuntimeError(f"shared memory: {self.failure}")


class Inbox:
    """What comes from one rank: receives posted by tag, and messages that nobody posted for yet."""

    def __init__(
        self, ring: Ring, call_helper: Callable[[], None], call_peer: Callable[[], None], spins: range, timeout_s: float
    ) -> None:
        self.ring, self._call_helper, self._call_peer = ring, call_helper, call_peer
        self._spins, self._timeout_s = spins, timeout_s
        self._words, self._map, self._slots, self._data = ring.words, ring.map, ring.slots, ring.data
        self._lock = threading.Lock()  # between the caller and the helper
        self._taken = 0
        self._posted: dict[int, Received] = {}  # the first of each tag
        self._early: dict[int, deque[Received]] = {}
        self._current: Received | None = None  # of which pieces are missing
        self.lost: str | None = None

    def post(self, tensor: Tensor, tag: int) -> Received:
        """Receive the next message of that tag into `tensor`."""
        received = Received(self, tensor)
        with self._lock:
            if tag in self._early:
                self._take_early(received, tag)
            elif tag in self._posted:
                last = self._posted[tag]
                while last.following is not None:
                    last = last.following
                last.following = received
            else:
                self._posted[tag] = received
        if self._words[STALLED]:
            self._call_helper()
        return received

    def _take_early(self, received: Received, tag: int) -> None:
        """Hand over a message that came, or began to come, before it was posted for."""
        messages = self._early[tag]
        early = messages.popleft()
        if not messages:
            del self._early[tag]
        if early.size != received.size:
            received.failure = _unequal(early.size, received.size)
        memmove(received.address, early.address, min(early.got, received.size))
        received.got, received.done = early.got, early.done
        if self._current is early:
            if received.failure:
                received.done = True  # the rest goes to the message that nobody reads
            else:
                self._current = received

    def take(self) -> bool:
        """Move the next piece out of the ring; say whether there was one."""
        words = self._words
        with self._lock:
            taken = self._taken
            if words[WRITTEN] == taken:
                return False
            tag, total, start, size = _unpack(self._map, self._slots + taken % SLOTS * 32)
            received = self._current or self._begin(tag, total)
            memmove(received.address + received.got, self._data + start, size)
            words[FREED] = self._taken = taken + 1
            received.got += size
            received.done = received.got == total
            self._current = None if received.done else received
        if words[STALLED]:
            self._call_peer()
        return True

    def _begin(self, tag: int, total: int) -> Received:
        """Return where a message goes: the first receive of its tag, else aside."""
        if tag in self._posted:
            received = self._posted.pop(tag)
            if received.following is not None:
                self._posted[tag] = received.following
            if received.size == total:
                return received
            received.failure, received.done = _unequal(total, received.size), True
            return Received(self, torch.empty(total, dtype=torch.uint8))
        early = Received(self, torch.empty(total, dtype=torch.uint8))
        self._early.setdefault(tag, deque()).append(early)
        return early

    def wait_for(self, received: Received) -> None:
        """Take pieces until `received` is done. Raises RuntimeError when the sender is gone or silent."""
        words = self._words
        while not received.done:
            seen = self._taken
            if words[WRITTEN] != seen or self._is_written_soon(seen):
                self.take()
            else:
                self._sleep(received, seen)

    def _is_written_soon(self, seen: int) -> bool:
        words = self._words
        for _ in self._spins:  # no call in it: a look at the clock would cost as much as the loop
            if words[WRITTEN] != seen:
                break
        return words[WRITTEN] != seen

    def _sleep(self, received: Received, seen: int) -> None:
        """Block until there is another piece, or the helper took it."""
        words, deadline = self._words, monotonic() + self._timeout_s
        self.ring.announce(ASLEEP)
        try:
            while True:
                lost = self.lost or (LEFT if words[SENDER_LEFT] else None)
                if words[WRITTEN] != seen or received.done:  # after the look whether it is lost: last words count
                    return
                if lost is not None:
                    raise RuntimeError(f"shared memory: {lost}")
                if monotonic() > deadline:
                    raise RuntimeError(f"shared memory: nothing came within {self._timeout_s:.0f} s")
                self.ring.nap(seen)
        finally:
            words[ASLEEP] = 0

    def help(self) -> None:
        """Take what is posted for, so that a sender without room gets on. Called by the helper only."""
        while self._words[STALLED] and (self._posted or self._current is not None) and self.take():
            pass

    def fail(self, why: str) -> None:
        """The sender is gone: whoever waits gets to know, once the ring is empty. Called by the helper only."""
        self.lost = why
        self.ring.wake()


def _unequal(came: int, expected: int) -> str:
    return f"a message of {came} bytes came where {expected} were expected"


class ShmTransport:
    """The rings of one rank, in the shape of a c10d backend. For the thread that made it."""

    def __init__(self, outboxes: dict[int, Outbox], inboxes: dict[int, Inbox], timeout_s: float) -> None:
        self._outboxes, self._inboxes, self._timeout_s = outboxes, inboxes, timeout_s

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        (tensor,), outbox = tensors, self._outboxes[peer]
        size = tensor.nbytes
        if size <= PIECE and not outbox.pending and not outbox.lost and outbox.put(tag, size, tensor.data_ptr(), size):
            return SENT
        return outbox.send_in_pieces(tensor, tag, self._timeout_s)

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        return self._inboxes[peer].post(tensors[0], tag)
