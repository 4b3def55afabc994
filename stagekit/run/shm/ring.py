"""The memory of the shared-memory transport: one ring of pieces per ordered pair of ranks, and how its two sides wait.

Each rank owns a memfd with a ring for every rank that sends to it. A ring has control words, each on a cache line of
its own, SLOTS descriptors and CAPACITY bytes; a sender that finds its ring empty starts at the front again, so that
small messages stay in the cache. Nothing is touched, hence no memory taken, where nothing is sent. Decides nothing about
messages (outbox, inbox) nor who has a ring (setup).

Note [Ordering]: a piece and its descriptor are stored before `WRITTEN`, and read after it; `FREED` is stored after the
last read. x86-64 shows stores in their order and loads in theirs, and each word is one aligned store of eight bytes, so
no more is needed there; nothing of that holds on aarch64, which is not offered this transport. Who goes to sleep must not
miss the store that would wake it: it sets `ASLEEP` (a sender without room: `STALLED`), has the kernel put a barrier into
every running thread that takes part (membarrier), and looks once more. The other side so pays one load, no barrier, a piece.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys

CAPACITY = 8 << 20  # bytes; what does not fit waits at its sender
SLOTS = 256
PIECE = 256 << 10  # larger messages travel in pieces, so that both sides copy at once, in the cache
NONCE_BYTES = 32
LEFT = "the other side ended its run"

# Control words by their index: pieces written and freed so far; the receiver sleeps; the sender has no room; who left.
WRITTEN, FREED, ASLEEP, STALLED, SENDER_LEFT, RECEIVER_LEFT = range(0, 48, 8)
FIRST_SLOT = 64  # index of the first descriptor: tag, bytes of the message, where the piece lies, nothing
_PAGE = 4096
_DATA_AT = 3 * _PAGE
RING_BYTES = _DATA_AT + CAPACITY

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # x86-64
_SYS_MEMBARRIER, _BARRIER, _REGISTER = 324, 2, 4
_syscall = ctypes.CDLL(None, use_errno=True)["syscall"]
memmove = ctypes.memmove


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


_NAP = ctypes.byref(
    _Timespec(0, 100_000_000)
)  # then a look around: who died in the moment of falling asleep wakes nobody


def refusal() -> str | None:
    """Return why this machine can't have such rings; None: it can, and this process takes part in barriers."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return f"it needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if _syscall(_SYS_MEMBARRIER, _REGISTER, 0, 0) != 0:
        return f"the kernel refuses membarrier: {os.strerror(ctypes.get_errno())}"
    return None


class Memory:
    """A rank's memfd, mapped: a nonce, then rings by position."""

    def __init__(self, fd: int, num_rings: int) -> None:
        """Map `fd`, which the caller may close afterwards. Raises OSError, ValueError."""
        self.map = mmap.mmap(fd, _PAGE + num_rings * RING_BYTES)
        self.words = memoryview(self.map).cast("q")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @staticmethod
    def make(num_rings: int, nonce: bytes) -> tuple[int, Memory]:
        """Return a new memfd, to be closed by the caller, and its mapping. Raises OSError."""
        fd = os.memfd_create("stagekit")
        try:
            os.ftruncate(fd, _PAGE + num_rings * RING_BYTES)
            memory = Memory(fd, num_rings)
        except BaseException:
            os.close(fd)
            raise
        memory.map[:NONCE_BYTES] = nonce
        return fd, memory

    @property
    def nonce(self) -> bytes:
        """What its owner wrote into it."""
        return self.map[:NONCE_BYTES]

    def close(self) -> None:
        """Unmap; rings in it must no longer be used."""
        self.words.release()
        self.map.close()


class Ring:
    """One direction between two ranks: where its words, descriptors and bytes are."""

    def __init__(self, memory: Memory, position: int) -> None:
        at = _PAGE + position * RING_BYTES
        self.words = memory.words[at // 8 : (at + _DATA_AT) // 8]
        self.data = memory.base + at + _DATA_AT  # address
        self._futex = ctypes.c_void_p(memory.base + at + 8 * WRITTEN)

    def wake(self) -> None:
        """Wake the receiver that sleeps on `WRITTEN`."""
        _syscall(_SYS_FUTEX, self._futex, _FUTEX_WAKE, 1, None, None, 0)

    def announce(self, word: int) -> None:
        """Set a word; what the other side stored before it could see that is visible on return."""
        self.words[word] = 1
        _syscall(_SYS_MEMBARRIER, _BARRIER, 0, 0)

    def nap(self, seen: int) -> None:
        """Sleep until the sender wakes this side, at most a tenth of a second; not at all unless WRITTEN is `seen`."""
        _syscall(_SYS_FUTEX, self._futex, _FUTEX_WAIT, ctypes.c_uint32(seen & 0xFFFFFFFF), _NAP, None, 0)

    def close(self) -> None:
        """Give the memory back to its mapping."""
        self.words.release()
