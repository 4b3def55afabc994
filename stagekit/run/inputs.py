"""Graph inputs and targets on their way: whole tensors go from the rank that owns them to the stages that need them.

Sent ahead at the start of a step (SEND_X / RECV_X), waited for at first use, cut into chunks here. A rank that was
given an argument itself uses its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from stagekit.errors import BugError
from stagekit.plan.contract import ModelSpec
from stagekit.run.layout import MAX_INPUTS, TAG_INPUTS
from stagekit.run.transport import Transport, Work, lost, settle, wire_view

Shape = tuple[tuple[int, ...], torch.dtype]
W = TypeVar("W", Work, Work | None)


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one SEND_X carries: numbers of graph inputs, and leaves of the target."""

    inputs: tuple[int, ...]
    target: tuple[int, ...]


class InputExchange:
    """Inputs of one step on one rank. `parcels[(from, to)]` are keyed by the stages of the routes."""

    def __init__(
        self,
        spec: ModelSpec,
        parcels: Mapping[tuple[int, int], Parcel],
        stage_ranks: Sequence[int],
        rank: int,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.device = device
        self._spec, self._parcels, self._ranks, self._rank = spec, dict(parcels), tuple(stage_ranks), rank
        self._transport = transport
        self._leaves: list[Any] = []
        self._target: list[Any] = []
        self.parts: list[tuple[Any, ...] | None] = [None] * len(spec.inputs)  # of this step, by graph input
        self._pending: dict[tuple[str, int], tuple[Work, int]] = {}
        self._sent: list[tuple[Work | None, Tensor, int]] = []

    def begin(
        self, leaves: Sequence[Any], target: Sequence[Any], shapes: Sequence[Shape], target_shapes: Sequence[Shape]
    ) -> None:
        """Take this rank's arguments of a step (None: not here) and the whole shapes of all of them."""
        self._leaves = [leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._target = [leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for leaf in target]
        self._shapes, self._target_shapes = shapes, target_shapes
        self.parts = [None] * len(self._spec.inputs)

    def stand_in(self) -> None:
        """Put zeros where a failed step lacks what this rank was to send."""
        for number, (shape, dtype) in enumerate(self._shapes):
            if self._spec.inputs[number].tensor is not None and not isinstance(self._leaves[number], Tensor):
                self._leaves[number] = torch.zeros(shape, dtype=dtype, device=self.device)
        for number, (shape, dtype) in enumerate(self._target_shapes):
            if not isinstance(self._target[number], Tensor):
                self._target[number] = torch.zeros(shape, dtype=dtype, device=self.device)

    def send(self, to_stage: int) -> None:
        """Post everything that `to_stage` gets from this rank."""
        for (source, target), parcel in self._parcels.items():
            if target != to_stage or self._ranks[source] != self._rank:
                continue
            for tag, tensor in self._items(parcel, target):
                wire = wire_view(tensor.detach().contiguous())
                peer = self._ranks[target]
                self._sent.append((self._post(self._transport.send, wire, peer, tag), wire, peer))

    def _items(self, parcel: Parcel, target: int) -> list[tuple[int, Tensor]]:
        base = TAG_INPUTS + target * 2 * MAX_INPUTS
        items = [(base + n, self._leaves[number]) for n, number in enumerate(parcel.inputs)]
        return items + [(base + MAX_INPUTS + n, self._target[number]) for n, number in enumerate(parcel.target)]

    def receive(self, from_stage: int, to_stage: int) -> None:
        """Post the receives of what `to_stage` gets."""
        parcel, peer = self._parcels[from_stage, to_stage], self._ranks[from_stage]
        base = TAG_INPUTS + to_stage * 2 * MAX_INPUTS
        for n, number in enumerate(parcel.inputs):
            shape, dtype = self._shapes[number]
            self._leaves[number] = buffer = torch.empty(shape, dtype=dtype, device=self.device)
            self._pending["input", number] = (self._post(self._transport.recv, buffer, peer, base + n), peer)
        for n, number in enumerate(parcel.target):
            shape, dtype = self._target_shapes[number]
            self._target[number] = buffer = torch.empty(shape, dtype=dtype, device=self.device)
            self._pending["target", number] = (
                self._post(self._transport.recv, buffer, peer, base + MAX_INPUTS + n),
                peer,
            )

    @staticmethod
    def _post(post: Callable[[list[Tensor], int, int], W], tensor: Tensor, peer: int, tag: int) -> W:
        try:
            return post([tensor], peer, tag)
        except RuntimeError as error:
            raise lost(peer, error) from error

    def _arrived(self, kind: str, number: int) -> None:
        pending = self._pending.pop((kind, number), None)
        if pending is not None:
            settle(*pending)

    def cut(self, number: int, sizes: Sequence[int]) -> tuple[Any, ...]:
        """Return graph input `number` in chunks, or all of it for each chunk where it carries no batch.

        Waits for it where it comes from another rank; kept in `parts` for the rest of the step.
        """
        declared = self._spec.inputs[number]
        parts: tuple[Any, ...]
        if declared.tensor is None:
            parts = (declared.constant,) * len(sizes)
        else:
            self._arrived("input", number)
            leaf = self._leaves[number]
            if not isinstance(leaf, Tensor):
                raise BugError(f"{declared.name} is needed here but was neither passed nor sent")
            dim = declared.split_dim
            parts = (leaf,) * len(sizes) if dim is None else torch.split(leaf, list(sizes), dim)
        self.parts[number] = parts
        return parts

    def target(self) -> list[Tensor]:
        """Return the target's leaves, whole."""
        for number in range(len(self._target)):
            self._arrived("target", number)
        return self._target

    def finish(self) -> None:
        """Wait for every send, and for what arrived but was not used."""
        for work, _, peer in self._sent:
            settle(work, peer)
        self._sent.clear()
        for work, peer in self._pending.values():
            settle(work, peer)
        self._pending.clear()
