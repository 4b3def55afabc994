"""What the shim has to say to the daemon: the newest message of each (rank, kind), never a queue.

So memory stays flat however slow or absent the daemon is, metrics that nobody fetched give way to newer ones, and a
daemon that comes back gets everything that it has not acknowledged. Standard library only.
"""

from __future__ import annotations

from piped.lines import Message

Key = tuple[int, str]

KEPT = frozenset({"spawned", "exited", "store", "joined", "plan", "failed", "done", "metrics", "unkillable"})


class Outbox:
    """Messages by key; `next` yields those that are due, oldest key first."""

    def __init__(self) -> None:
        self._messages: dict[Key, Message] = {}
        self._due: dict[Key, None] = {}  # an ordered set

    def put(self, rank: int, kind: str, message: Message) -> None:
        """Make `message` the newest of its key, to be sent."""
        self._messages[rank, kind] = message
        self._due[rank, kind] = None

    def next(self) -> Message | None:
        """Return the next message to send, or None. It is kept until acknowledged if its kind is in KEPT."""
        if not self._due:
            return None
        key = next(iter(self._due))
        del self._due[key]
        return self._messages[key] if key[1] in KEPT else self._messages.pop(key)

    def resend(self) -> None:
        """A new daemon listens: everything that is kept is due again."""
        self._due = dict.fromkeys(self._messages)

    def acknowledge(self, rank: int, kind: str) -> None:
        """Forget a message; metrics stay, a counter's last value is wanted as long as the shim lives."""
        if kind != "metrics":
            self._messages.pop((rank, kind), None)
            self._due.pop((rank, kind), None)

    def holds(self, kind: str) -> bool:
        """Say whether any message of `kind` waits for its acknowledgement."""
        return any(key[1] == kind for key in self._messages)
