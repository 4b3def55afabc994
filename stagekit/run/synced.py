"""A stage with SyncBatchNorm: its replicas meet in every forward and backward of a chunk, also where one does not compute.

Each layer sums once over the replicas in a chunk's forward and once in its backward. All sums of a stage are padded to one
length and counted, so that a replica that failed joins what is left of an action with zeros. A chunk that weighs nothing
is computed backward all the same, from zeros: its rows are in the statistics of others. On a group of their own, since the all-reduces of gradient buckets come whenever a bucket is
complete. Called by stagekit.run.runtime; graph side: stagekit.synced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stagekit.errors import PeerError
from stagekit.run.stage import StageRunner
from stagekit.synced import summing

T = TypeVar("T")


class Meetings:
    """The sums of one stage over its replicas: as many per action as were agreed, whoever computes."""

    def __init__(self, channels: Sequence[int], group: dist.ProcessGroup, device: torch.device, stage: int) -> None:
        """`channels` of each layer, in the order of a forward; `device`: where they are computed."""
        self._group, self._device, self._stage = group, device, stage
        self._length = 2 * max(channels) + 1
        self.per_pass = len(channels)
        self._action: tuple[str, int] | None = None
        self._left = 0  # of the action that runs

    def begin(self, action: tuple[str, int], num_sums: int) -> None:
        """An action begins that sums so often; the same one again: what was left of it is."""
        if action != self._action:
            self._action, self._left = action, num_sums

    def join_rest(self) -> None:
        """Take part in the sums that are left of the action, with zeros."""
        while self._left > 0:
            self.sum(torch.zeros(0, dtype=torch.float64, device=self._device))

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum of a float64 vector over the replicas. Raises PeerError."""
        padded = vector.new_zeros(self._length)
        padded[: len(vector)] = vector
        self._left -= 1
        try:
            dist.all_reduce(padded, group=self._group)
        except RuntimeError as error:
            raise PeerError(f"sum of a SyncBatchNorm of stage {self._stage} over replicas: {error}") from error
        return padded[: len(vector)]


class SyncedStageRunner(StageRunner):
    """A stage whose replicas meet. `synchronise` switches that on, once warm-up is over: there each is alone."""

    _meetings: Meetings | None = None

    def synchronise(self, meetings: Meetings) -> None:
        """From now on every forward and backward meets the replicas'."""
        self._meetings = meetings

    def forward(self, chunk: int, arguments: list[Any], seed_base: int, train: bool) -> tuple[Tensor, ...]:
        """Like StageRunner's."""
        return self._met("F", chunk, lambda: StageRunner.forward(self, chunk, arguments, seed_base, train))

    def backward(self, chunk: int, gradients: Sequence[Tensor | None]) -> list[Any]:
        """Like StageRunner's."""
        return self._met("B", chunk, lambda: StageRunner.backward(self, chunk, gradients))

    def input_gradient(self, chunk: int, gradients: Sequence[Tensor | None]) -> list[Any]:
        """Like StageRunner's."""
        return self._met("B", chunk, lambda: StageRunner.input_gradient(self, chunk, gradients))

    def backward_from(self, chunk: int, root: Tensor, gradient: Tensor | None) -> list[Any]:
        """Like StageRunner's."""
        if gradient is None:
            return self.backward(chunk, [None] * len(self.spec.outputs))
        return self._met("B", chunk, lambda: StageRunner.backward_from(self, chunk, root, gradient))

    def input_gradient_from(self, chunk: int, root: Tensor, gradient: Tensor | None) -> list[Any]:
        """Like StageRunner's."""
        if gradient is None:
            return self.input_gradient(chunk, [None] * len(self.spec.outputs))
        return self._met("B", chunk, lambda: StageRunner.input_gradient_from(self, chunk, root, gradient))

    def join_forward(self, chunk: int) -> None:
        """Meet without computing."""
        self._met("F", chunk, lambda: None)

    def join_backward(self, chunk: int) -> None:
        """Meet without computing."""
        self._met("B", chunk, lambda: None)

    def _run_backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: tuple[Any, ...]
    ) -> None:
        """Like StageRunner's, also from outputs whose gradient is zero: another replica's reach this one's rows."""
        if self._meetings is not None:
            pairs = zip(outputs, gradients, strict=True)
            gradients = [torch.zeros_like(output) if gradient is None else gradient for output, gradient in pairs]
        super()._run_backward(outputs, gradients, wanted)

    def _met(self, op: str, chunk: int, compute: Callable[[], T]) -> T:
        meetings = self._meetings
        if meetings is None:
            return compute()
        passes = 2 if op == "B" and self.keeps_no_graph else 1  # a forward once more before it
        meetings.begin((op, chunk), passes * meetings.per_pass)
        with summing(meetings.sum):
            made = compute()
        meetings.join_rest()
        return made


def synced_channels(module: Any) -> tuple[int, ...]:
    """Return the channels of each SyncBatchNorm that a forward of a stage's module calls."""
    found: tuple[int, ...] = getattr(module, "synced_channels", ())
    return found
