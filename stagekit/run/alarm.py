"""The first error of a step, told to every rank while the step still runs.

A rank that fails writes its error into the group's store, where the first one stays, and then a key of each rank's own; a
thread of that rank waits for it there (0.8 ms) and sets `rang`, which the executor reads between actions. Who hears it
goes on through its list without computing, so that nobody waits for a transfer that never comes. The thread ends with
its alarm: `close`, or nobody refers to it any more, writes that one rank's key. Decides nothing about the list. Made by
stagekit.run.groups.
"""

from __future__ import annotations

import contextlib
import json
import threading
import traceback
import weakref
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist

from stagekit.errors import PeerError, RemoteError, StageError

_WAIT = timedelta(hours=1)


class Silence:
    """What a rank without neighbours hears."""

    rang = False


class Alarm:
    """One per deployed pipeline and rank. `key` is the same on every rank and no other pipeline's."""

    def __init__(self, store: Any, key: str, rank: int, world_size: int) -> None:
        self._store, self._key, self._rank, self._world_size = store, key, rank, world_size
        self._generation = 0  # errors so far
        self._own: Exception | None = None
        self._lock = threading.Lock()  # between `failure` and a thread that hears late
        self.rang = False
        self._release: weakref.finalize[..., Any] | None = None  # ends the thread that waits
        self._watch()

    def close(self) -> None:
        """End the thread; nothing is heard any more."""
        if self._release is not None:
            self._release()

    def report(self, error: Exception) -> None:
        """Tell every rank that this step failed here."""
        self._own, self.rang = error, True
        root = error.__cause__ or error
        place = [error.stage, error.chunk, error.op] if isinstance(error, StageError) else [-1, -1, ""]
        text = "".join(traceback.format_exception(root))
        told = json.dumps([self._rank, *place, str(error), text])
        try:
            self._store.compare_set(self._name, "", told)
            for rank in range(self._world_size):
                self._store.set(f"{self._name}/{rank}", "rang")
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
        self.close()
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
        key = f"{self._name}/{self._rank}"
        self._release = weakref.finalize(self, _wake, self._store, key)
        self._release.atexit = False
        arguments = (weakref.ref(self), self._store, self._name, key)
        threading.Thread(target=_wait, args=arguments, name="stagekit alarm", daemon=True).start()

    def _heard(self, name: str) -> None:
        with self._lock:
            if name == self._name and self._release is not None and self._release.alive:
                self.rang = True


def _wake(store: Any, key: str) -> None:
    with contextlib.suppress(RuntimeError):  # the store is gone, and so is the thread
        store.set(key, "closed")


def _wait(alarm: weakref.ref[Alarm], store: Any, name: str, key: str) -> None:
    """Wait for a rank's key; holds no reference to the alarm meanwhile, which may be forgotten."""
    try:
        own = store.clone()  # a connection of its own: a wait blocks it
        while not _came(own, key):
            if alarm() is None:
                return
    except RuntimeError:  # the store is gone: ranks then learn of an error at the end of the step
        return
    there = alarm()
    if there is not None:
        there._heard(name)


def _came(store: Any, key: str) -> bool:
    """Wait for a key as long as a store lets one; say whether it is there. Raises RuntimeError if the store is gone."""
    began = monotonic()
    try:
        store.wait([key], _WAIT)
    except dist.DistStoreError:
        if monotonic() - began < _WAIT.total_seconds() / 2:
            raise
        return False
    return True
