"""The helper thread of a rank's shared-memory transport: what can't be done in the caller's thread.

It sleeps until somebody writes to its bell (a pipe): this rank, because a send found no room or a receive was posted for a
sender without room; a peer, because it made room, or has none. And it hears at once of a peer's death (pidfd). Small
messages never need it. Decides nothing about messages (outbox, inbox). Made by stagekit.run.shm.setup.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stagekit.run.shm.inbox import Inbox
from stagekit.run.shm.outbox import Outbox
from stagekit.run.shm.ring import LEFT, RECEIVER_LEFT, SENDER_LEFT, Memory

log = logging.getLogger(__name__)


class Bell:
    """The writing end of a helper's pipe, and ours to close."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def ring(self) -> None:
        """Wake that helper."""
        try:
            os.write(self._fd, b"!")
        except (BlockingIOError, BrokenPipeError):  # it has not yet heard the last ones; it is gone, as pidfd will tell
            pass

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Link:
    """What this rank shares with one peer."""

    rank: int
    memory: Memory  # the peer's
    bell: Bell  # the peer's
    pidfd: int
    outbox: Outbox
    inbox: Inbox

    def fail(self, why: str) -> None:
        """Whoever waits for the peer gets to know."""
        self.outbox.fail(why)
        self.inbox.fail(why)

    def leave(self) -> None:
        """Tell the peer that this side's run is over."""
        self.outbox.ring.words[SENDER_LEFT] = self.inbox.ring.words[RECEIVER_LEFT] = 1
        self.outbox.ring.wake()
        self.bell.ring()

    def close(self) -> None:
        """Give everything back."""
        self.outbox.ring.close()
        self.inbox.ring.close()
        self.memory.close()
        self.bell.close()
        os.close(self.pidfd)


class Helper:
    """One thread per rank."""

    def __init__(
        self, memory: Memory, bell_fd: int, bell: Bell, links: Mapping[int, Link], forget: Callable[[], None]
    ) -> None:
        """Own `memory` (this rank's), both ends of its bell, and the links. `bell_fd` must not block.

        `forget` is called before any of it is given back.
        """
        self._forget = forget
        self._memory, self._bell_fd, self._bell, self._links = memory, bell_fd, bell, links
        self._owner, self._is_over = os.getpid(), False
        self._is_closed_within = False  # by the garbage collector, in the helper's own thread
        self._thread = threading.Thread(target=self._run, name="stagekit shared memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whoever waits for this thread must not wait for ever
            log.exception("the helper of shared memory failed")
            for link in self._links.values():
                link.fail(f"its helper failed: {type(error).__name__}: {error}")
        if self._is_closed_within:
            self._give_back()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._bell_fd, select.POLLIN)
        peers = {link.pidfd: link for link in self._links.values()}
        for pidfd in peers:
            poll.register(pidfd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._bell_fd:
                    os.read(fd, 4096)
                else:
                    poll.unregister(fd)
                    peers[fd].fail(f"the process of pipeline rank {peers[fd].rank} is gone")
            if self._is_over:
                return
            for link in self._links.values():
                link.outbox.push()
                link.inbox.help()

    def close(self) -> None:
        """Tell the peers, end the thread, give memory and descriptors back. Does nothing in a forked child.

        In the thread itself, in whatever it does just then, it only asks for that: the thread does the rest as it ends.
        """
        if self._is_over or os.getpid() != self._owner:
            return
        self._is_over = True
        self._forget()
        self._is_closed_within = threading.current_thread() is self._thread
        self._bell.ring()
        if not self._is_closed_within:
            self._thread.join()
            self._give_back()

    def _give_back(self) -> None:
        for link in self._links.values():
            link.outbox.fail(LEFT)
            link.leave()
            link.close()
        self._memory.close()
        self._bell.close()
        os.close(self._bell_fd)
