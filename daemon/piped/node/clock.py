"""How far this node's wall clock is from the coordinator's: shown and used as an error bar, never a reason to do anything.

Each beat's answer carries the coordinator's clock, which was read at some moment between the beat and the answer. Of the
last answers the quickest counts. Pure; called by piped.node.session.
"""

from __future__ import annotations

from collections import deque

_KEPT = 16  # answers: a clock that is set anew is seen after so many beats
_MAX_WAITING = 64


class ClockOffset:
    """This clock minus the coordinator's."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int]] = {}  # beat -> (monotonic, wall clock), both in ns
        self._kept: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (error, offset)

    def sent(self, beat_seq: int, monotonic_ns: int, wall_ns: int) -> None:
        """Note when a beat left."""
        self._sent[beat_seq] = monotonic_ns, wall_ns
        if len(self._sent) > _MAX_WAITING:
            del self._sent[min(self._sent)]

    def answered(self, beat_seq: int, monotonic_ns: int, coordinator_ns: int) -> None:
        """Take the coordinator's wall clock from the answer to a beat; 0: it said none."""
        if (sent := self._sent.pop(beat_seq, None)) is None or not coordinator_ns:
            return
        half_ns = max(0, monotonic_ns - sent[0]) // 2
        self._kept.append((half_ns / 1e9, (sent[1] + half_ns - coordinator_ns) / 1e9))

    @property
    def best(self) -> tuple[float, float] | None:
        """Return (offset, error), both in seconds, the offset being within ±error; None before the first answer."""
        if not self._kept:
            return None
        error_s, offset_s = min(self._kept)
        return offset_s, error_s
