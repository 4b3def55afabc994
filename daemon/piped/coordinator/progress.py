"""Live numbers of the ranks, from beats: memory only, gone after a restart, replaced by the next beat.

`sessions` writes, `services` and `http` read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from piped.core.model import Progress

KEPT_ATTEMPTS = 1000


class ProgressBoard:
    """The newest progress of each rank, by fence; the oldest attempts are forgotten beyond a limit."""

    def __init__(self) -> None:
        self._by_fence: OrderedDict[int, dict[int, Progress]] = OrderedDict()

    def update(self, fence: int, rank: int, progress: Progress) -> bool:
        """Note the progress; return whether it differs from the last."""
        ranks = self._by_fence.setdefault(fence, {})
        if ranks.get(rank) == progress:
            return False
        ranks[rank] = progress
        if len(self._by_fence) > KEPT_ATTEMPTS:
            self._by_fence.popitem(last=False)
        return True

    def of(self, fence: int) -> Mapping[int, Progress]:
        """Return the progress of an attempt by rank; empty when nothing came yet."""
        return self._by_fence.get(fence, {})
