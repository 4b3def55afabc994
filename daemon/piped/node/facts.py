"""What the coordinator must hear: facts by key, each kept until it is acknowledged.

No queue: a fact is stored under (fence, rank, kind) and sent again after every reconnect. Written by the supervisor,
read by the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from piped.node.model import Fact, FactKey


class FactBook:
    """Facts of this daemon's life. `changed` is set whenever one is new or unsent."""

    def __init__(self) -> None:
        self._open: dict[FactKey, Fact] = {}
        self._unsent: dict[FactKey, None] = {}
        self._acknowledged: set[FactKey] = set()
        self.changed = asyncio.Event()
        self._emptied = asyncio.Event()

    def put(self, fact: Fact) -> bool:
        """Take a fact; False if its key is known, acknowledged or not: the first one stands."""
        if fact.key in self._acknowledged or fact.key in self._open:
            return False
        self._open[fact.key] = fact
        self._unsent[fact.key] = None
        self.changed.set()
        return True

    def take_unsent(self) -> list[Fact]:
        """Return the facts that this session has not sent yet, oldest first, and count them as sent."""
        facts = [self._open[key] for key in self._unsent if key in self._open]
        self._unsent.clear()
        self.changed.clear()
        return facts

    def resend(self) -> None:
        """A new session begins: everything that is open is to be sent."""
        self._unsent = dict.fromkeys(self._open)
        self.changed.set()

    def acknowledge(self, keys: Iterable[FactKey]) -> list[FactKey]:
        """Note what the coordinator stored; return the keys that were open."""
        done = [key for key in keys if self._open.pop(key, None) is not None]
        self._acknowledged.update(done)
        if not self._open:
            self._emptied.set()
        return done

    async def wait_empty(self) -> None:
        """Return once every fact is acknowledged."""
        while self._open:
            self._emptied.clear()
            await self._emptied.wait()

    def is_acknowledged(self, key: FactKey) -> bool:
        """Say whether the coordinator stored this fact."""
        return key in self._acknowledged

    def has_open(self, fence: int) -> bool:
        """Say whether a fact of this attempt is not acknowledged."""
        return any(key[0] == fence for key in self._open)

    def forget(self, fence: int) -> None:
        """Drop what is remembered of a closed attempt."""
        self._acknowledged = {key for key in self._acknowledged if key[0] != fence}
