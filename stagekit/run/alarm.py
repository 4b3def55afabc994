"""The first error of a step, told to every rank while the step still runs.

A rank that fails writes its error into the group's store, where the first one stays; a thread of every rank waits for it
there (0.8 ms) and sets `rang`, which the executor reads between actions. Who hears it goes on through its list without
computing, so that nobody waits for a transfer that never comes. Decides nothing about the list. Made by
stagekit.run.groups.
"""

from __future__ import annotations

import json
import threading
import traceback
from datetime import timedelta
from typing import Any

from stagekit.errors import PeerError, RemoteError, StageError

_WAIT = timedelta(hours=1)


class Silence:
    """What a rank without neighbours hears."""

    rang = False


class Alarm:
    """One per deployed pipeline and rank. `key` is the same on every rank and no other pipeline's."""

    def __init__(self, store: Any, key: str, rank: int) -> None:
        self._store, self._key, self._rank = store, key, rank
        self._generation = 0  # errors so far
        self._own: Exception | None = None
        self._lock = threading.Lock()  # between `failure` and a thread that hears late
        self.rang = False
        self._watch()

    def report(self, error: Exception) -> None:
        """Tell every rank that this step failed here."""
        self._own, self.rang = error, True
        root = error.__cause__ or error
        place = [error.stage, error.chunk, error.op] if isinstance(error, StageError) else [-1, -1, ""]
        text = "".join(traceback.format_exception(root))
        told = json.dumps([self._rank, *place, str(error), text])
        try:
            self._store.compare_set(self._name, "", told)
        except RuntimeError as lost:
            raise PeerError(f"telling the other ranks of an error: {lost}") from error

    def failure(self) -> Exception:
        """Return what this rank raises for a failed step, and be ready for the next step.

        The rank's own error where that was the first, else RemoteError with the first rank's words and traceback.
        """
        try:
            rank, stage, chunk, op, message, text = json.loads(self._store.get(self._name))
        except RuntimeError as error:
            raise PeerError(f"asking for the error of another rank: {error}") from error
        with self._lock:
            own, self._own, self.rang = self._own, None, False
            self._generation += 1
        self._watch()
        if rank == self._rank and own is not None:
            return own
        remote = RemoteError(message, rank=rank, stage=stage, chunk=chunk, op=op, traceback=text)
        remote.add_note(f"on rank {rank}:\n{text}")
        return remote

    @property
    def _name(self) -> str:
        return f"{self._key}/{self._generation}"

    def _watch(self) -> None:
        threading.Thread(target=self._wait, args=(self._name,), name="stagekit alarm", daemon=True).start()

    def _wait(self, name: str) -> None:
        try:
            store = self._store.clone()  # a connection of its own: a wait blocks it
            store.wait([name], _WAIT)
        except RuntimeError:  # the store is gone or silent: ranks then learn of an error at the end of the step
            return
        with self._lock:
            if name == self._name:
                self.rang = True
