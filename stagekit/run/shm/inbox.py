"""What comes from one rank through shared memory: matched by tag, in the order of the sends of a tag.

Used by the caller's thread (`ShmTransport`, `Received`) and the helper's, which take turns, see `Inbox`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from time import monotonic

import torch
from torch import Tensor

from stagekit.run.shm.outbox import LARGE
from stagekit.run.shm.ring import (
    ASLEEP,
    FIRST_SLOT,
    FREED,
    LEFT,
    PIECE,
    SENDER_LEFT,
    SLOTS,
    STALLED,
    WRITTEN,
    Ring,
    memmove,
)

MOST_ASLEEP = 3  # waits without a look after looks in vain: tiny steps took 5 % longer with 31
TURN_S = 20e-6  # a helper's pause while the caller is inside, a copy of one piece at most


class Received:
    """A posted receive, or a message that nobody posted for; its tensor stays alive with it."""

    inbox: Inbox
    tensor: Tensor
    done, failure = False, ""
    following: Received | None = None  # posted later for the same tag
    address = total = got = 0  # of the message, once it began to come

    def is_completed(self) -> bool:
        return self.done and not self.failure

    def wait(self) -> None:
        """Block until the message is in the tensor. Raises RuntimeError when its sender is gone or silent."""
        inbox = self.inbox
        while not self.done:
            inbox.is_inside = True
            try:
                has_moved = not inbox.is_helped and inbox.move()
            finally:
                inbox.is_inside = False
            if not has_moved:
                inbox.rest(self)
        if self.failure:
            raise RuntimeError(f"shared memory: {self.failure}")


class Inbox:
    """What comes from one rank: receives posted by tag, and messages that nobody posted for yet.

    Caller and helper take turns without a lock on the caller's way: it says that it is inside and looks whether the helper
    is; the helper says that it is and looks whether the caller is inside. Under the interpreter's lock one of them sees
    the other: the helper then waits until the caller is out, the caller waits for the lock, which the helper holds.
    """

    def __init__(
        self, ring: Ring, call_helper: Callable[[], None], call_peer: Callable[[], None], spins: range, timeout_s: float
    ) -> None:
        self.ring, self._call_helper, self._call_peer = ring, call_helper, call_peer
        self._spins, self._timeout_s = spins, timeout_s
        self._words, self._data = ring.words, ring.data
        self._waits_asleep = self._vain = 0
        self.is_inside = self.is_helped = False
        self._lock = threading.Lock()
        self._taken = 0
        self._posted: dict[int, Received] = {}  # the first of each tag
        self._early: dict[int, deque[Received]] = {}
        self._current: Received | None = None  # of which pieces are missing
        self.lost: str | None = None

    def post(self, tensors: list[Tensor], peer: int, tag: int, /) -> Received:
        """Receive the next message of that tag into the one tensor; `peer` is this inbox's, see Transport.recv."""
        (tensor,), received = tensors, Received()
        received.inbox, received.tensor = self, tensor
        self.is_inside = True
        try:
            is_plain = not (self.is_helped or tag in self._early or tag in self._posted)
            if is_plain:
                self._posted[tag] = received
        finally:
            self.is_inside = False
        if not is_plain:
            with self._lock:
                self._post_with_care(received, tag)
        words = self._words
        if words[WRITTEN] != self._taken and (words[STALLED] or tensor.nbytes > LARGE):
            self._call_helper()
        return received

    def _post_with_care(self, received: Received, tag: int) -> None:
        """Post where there may be a message, or a receive, of that tag."""
        if tag in self._early:
            self._take_early(received, tag)
        elif tag in self._posted:
            last = self._posted[tag]
            while last.following is not None:
                last = last.following
            last.following = received
        else:
            self._posted[tag] = received

    def _take_early(self, received: Received, tag: int) -> None:
        """Hand over a message that came, or began to come, before it was posted for."""
        messages = self._early[tag]
        early = messages.popleft()
        if not messages:
            del self._early[tag]
        if received.tensor.nbytes != early.total:
            received.failure, received.done = _unequal(early.total, received.tensor.nbytes), True
            return
        received.address, received.total, received.got = received.tensor.data_ptr(), early.total, early.got
        memmove(received.address, early.address, early.got)
        received.done = early.done
        if self._current is early:
            self._current = received

    def move(self) -> bool:
        """Move the next piece out of the ring; say whether there was one. For who has its turn."""
        words, taken = self._words, self._taken
        if words[WRITTEN] == taken:
            return False
        at, received, posted = FIRST_SLOT + taken % SLOTS * 4, self._current, self._posted
        if received is None:
            tag, total = words[at], words[at + 1]
            if tag in posted and (received := posted[tag]).following is None and received.tensor.nbytes == total:
                del posted[tag]
            else:
                received = self._begin(tag, total)
            received.address, received.total = received.tensor.data_ptr(), total
        got = received.got
        size = received.total - got
        if size > PIECE:
            size, self._current = PIECE, received
        else:
            self._current = None
        memmove(received.address + got, self._data + words[at + 2], size)
        received.got = got + size
        received.done = self._current is None  # before the count: who sees that all was taken sees this, too
        words[FREED] = self._taken = taken + 1
        if words[STALLED]:
            self._call_peer()
        return True

    def _begin(self, tag: int, total: int) -> Received:
        """Return where a message goes: the first receive of its tag, else aside."""
        aside = Received()
        if tag in self._posted:
            received = self._posted.pop(tag)
            if received.following is not None:
                self._posted[tag] = received.following
            if received.tensor.nbytes == total:
                return received
            received.failure, received.done = _unequal(total, received.tensor.nbytes), True
        else:
            self._early.setdefault(tag, deque()).append(aside)
        aside.tensor = torch.empty(total, dtype=torch.uint8)
        return aside

    def rest(self, received: Received) -> None:
        """Block until there is another piece, or the helper moved one. Raises RuntimeError, see `Received.wait`."""
        if self.is_helped:
            with self._lock:
                return
        words, seen = self._words, self._taken
        if self._waits_asleep > 0:
            self._waits_asleep -= 1
        elif self._is_written_soon(seen):
            return
        deadline = float("inf")  # from the end of the first nap, most never see it
        self.ring.announce(ASLEEP)
        try:
            while True:
                lost = self.lost or (LEFT if words[SENDER_LEFT] else None)
                if words[WRITTEN] != seen or received.done:  # after the look whether it is lost: last words count
                    return
                if lost is not None:
                    raise RuntimeError(f"shared memory: {lost}")
                self.ring.nap(seen)
                if words[WRITTEN] == seen:
                    deadline = min(deadline, monotonic() + self._timeout_s)
                    if monotonic() >= deadline:
                        raise RuntimeError(f"shared memory: nothing came within {self._timeout_s:.0f} s")
        finally:
            words[ASLEEP] = 0

    def _is_written_soon(self, seen: int) -> bool:
        """Look for a while. After one in vain, twice as many waits as after the last go to sleep at once, up to MOST_ASLEEP."""
        words = self._words
        for _ in self._spins:  # no call in it: a look at the clock would cost as much as the loop
            if words[WRITTEN] != seen:
                self._vain = 0
                return True
        self._vain = min(2 * self._vain + 1, MOST_ASLEEP)
        self._waits_asleep = self._vain
        return False

    def help(self) -> None:
        """Move what is posted for, if its sender has no room or it is large. Called by the helper only."""
        words = self._words
        if words[ASLEEP] or not (words[STALLED] or self._is_large_next()):  # who sleeps there takes it itself
            return
        with self._lock:
            self.is_helped = True
            try:
                while self.is_inside:
                    time.sleep(TURN_S)
                while (self._posted or self._current) and (words[STALLED] or self._is_large_next()) and self.move():
                    pass
            finally:
                self.is_helped = False

    def _is_large_next(self) -> bool:
        words, taken = self._words, self._taken
        if words[WRITTEN] == taken:
            return False
        return self._current is not None or words[FIRST_SLOT + taken % SLOTS * 4 + 1] > LARGE

    def fail(self, why: str) -> None:
        """The sender is gone: whoever waits gets to know, once the ring is empty. Called by the helper only."""
        self.lost = why
        self.ring.wake()


def _unequal(came: int, expected: int) -> str:
    return f"a message of {came} bytes came where {expected} were expected"
