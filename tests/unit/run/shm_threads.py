"""Ranks that share memory as threads of one process: each has its own mappings, helper and descriptors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stagekit.run.shm.setup import connect


def held():
    """Return the descriptors and threads of this process."""
    return sorted(path.name for path in Path("/proc/self/fd").iterdir()), threading.enumerate()


class Board:
    """What ranks in threads exchange texts over; `tamper` changes what everybody reads of a rank's first text."""

    def __init__(self, num_ranks, tamper=lambda rank, text: text):
        self._texts, self._barrier, self._tamper = [""] * num_ranks, threading.Barrier(num_ranks, timeout=20), tamper
        self._rounds = [0] * num_ranks

    def of(self, rank):
        def exchange(text):
            self._rounds[rank] += 1
            self._texts[rank] = self._tamper(rank, text) if self._rounds[rank] == 1 else text
            self._barrier.wait()
            texts = list(self._texts)
            self._barrier.wait()
            return texts

        return exchange


def on_all(num_ranks, function):
    """Call `function(rank)` in a thread per rank; return the results."""
    with ThreadPoolExecutor(num_ranks) as threads:
        return [future.result(20) for future in [threads.submit(function, rank) for rank in range(num_ranks)]]


def connected(num_ranks, modes=None, tamper=lambda rank, text: text, timeout_s=20.0):
    """Return each rank's (transport, helper, reasons)."""
    board = Board(num_ranks, tamper)
    mode_of = modes or ["auto"] * num_ranks

    def join(rank):
        return connect(rank, num_ranks, board.of(rank), mode=mode_of[rank], refused=None, timeout_s=timeout_s)

    return on_all(num_ranks, join)
