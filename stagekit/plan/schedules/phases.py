"""A rank of a V written phase by phase: forwards and backwards of its near (first) and far (second) stage, and W.

Chunks are counted here, so that a phase says only what comes next; what a stage has no chunk left for is left out.
Called by stagekit.plan.schedules.zb_v and dualpipe.
"""

from __future__ import annotations

from collections import deque

from stagekit.plan.actions import Action, Op


class Phases:
    """The list of one rank as it grows."""

    def __init__(self, near: int, far: int, num_chunks: int) -> None:
        self.near, self.far = near, far
        self.row: list[Action] = []
        self._num_chunks = num_chunks
        self._forwards, self._backwards = {near: 0, far: 0}, {near: 0, far: 0}
        self._waiting: deque[tuple[int, int]] = deque()

    def has_forwards(self) -> bool:
        """Say whether a forward of either stage is left."""
        return min(self._forwards.values()) < self._num_chunks

    def has_backwards(self) -> bool:
        """Say whether a backward of either stage is left."""
        return min(self._backwards.values()) < self._num_chunks

    def forward(self, stage: int) -> None:
        """List the next forward of `stage`."""
        chunk = self._forwards[stage]
        if chunk < self._num_chunks:
            self._forwards[stage] += 1
            self.row.append(Action(Op.F, stage, chunk))

    def backward(self, stage: int) -> None:
        """List the next full backward of `stage`."""
        chunk = self._next_backward(stage)
        if chunk is not None:
            self.row.append(Action(Op.B, stage, chunk))

    def input_grad(self, stage: int) -> None:
        """List the next I of `stage`; its W waits."""
        chunk = self._next_backward(stage)
        if chunk is not None:
            self._waiting.append((stage, chunk))
            self.row.append(Action(Op.I, stage, chunk))

    def weight_grad(self) -> None:
        """List the W that has waited longest."""
        if self._waiting:
            self.row.append(Action(Op.W, *self._waiting.popleft()))

    def rest(self) -> tuple[Action, ...]:
        """List every W that waits, and return the whole list."""
        while self._waiting:
            self.weight_grad()
        return tuple(self.row)

    def _next_backward(self, stage: int) -> int | None:
        chunk = self._backwards[stage]
        if chunk >= self._forwards[stage]:
            return None
        self._backwards[stage] += 1
        return chunk
