"""How a call begins: every rank learns which call the first rank makes, and compares it with its own.

The first rank of a pipeline sends the others one message of int64s: the call, the step's number, whether it is the first
of its kind (the ranks then agree who passes what before anything else is sent), and after these the header of the batch.
First ranks of replicas compare theirs before; what the first replica calls counts. A rank that makes another call is
told here, before it posts a receive that nobody would send for; what it then does is stagekit.run.runtime's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NoReturn

import torch

from stagekit.errors import UserError
from stagekit.run.groups import Groups
from stagekit.run.layout import TAG_HEADER
from stagekit.run.transport import settle

_LENGTH = 64  # of the message; a header that does not fit sends its rest in a second one


class Call(IntEnum):
    """What all ranks call together."""

    STEP = 0
    UNSYNCED_STEP = 1
    EVAL = 2
    PASS_STEP = 3
    CLIP = 4
    UNSCALE = 5

    def __str__(self) -> str:
        return "step() inside no_sync()" if self is Call.UNSYNCED_STEP else self.word

    @property
    def word(self) -> str:
        """The call as a program writes it."""
        words = (
            "step()",
            "step()",
            "eval()",
            "pass_step()",
            "clip_grad_norm_()",
            "unscale_() or step() of a GradScaler",
        )
        return words[self]

    @property
    def has_batch(self) -> bool:
        """Whether ranks pass arguments, and agree on the first one who does."""
        return self in (Call.STEP, Call.UNSYNCED_STEP, Call.EVAL, Call.PASS_STEP)


@dataclass(frozen=True, slots=True)
class Opening:
    """One rank's call; `header` as the first rank sends it, empty before it does."""

    call: Call
    number: int  # of the step
    is_first: bool  # of its kind: who passes what is not agreed yet
    header: tuple[int, ...] = ()

    def problem_with(self, own: Opening, rank: int) -> UserError | None:
        """Return why `rank`, which makes the call `own`, can't take part in this one; None if it can."""
        if own.call is not self.call:
            return UserError(
                f"rank {rank} called {own.call} where the pipeline's first rank called {self.call}; make the same calls in the "
                "same order on every rank, as often"
            )
        if own.number != self.number:
            return UserError(
                f"rank {rank} is at step {own.number}, the pipeline's first rank at step {self.number}; make the same calls on "
                "every rank, as often, and resume all of them at the same step"
            )
        return None


class Openings:
    """Sends or receives the openings of one rank."""

    def __init__(self, groups: Groups, num_ranks: int) -> None:
        self._groups, self._num_ranks = groups, num_ranks

    def hear(self, own: Opening) -> Opening:
        """Return what this pipeline's ranks do, as its first rank says; on that one, as the first replica's says.

        Blocks until those ranks make a call. Raises PeerError.
        """
        if self._groups.pipeline_rank:
            return self.receive()
        said = self._groups.gather_over_replicas([own.call, own.number, own.is_first])
        call, number, is_first = said[0]
        passes = {Call.STEP, Call.PASS_STEP}  # a replica without a batch passes a step of the others
        theirs = own.call if {own.call, Call(call)} == passes else Call(call)
        return replace(own, call=theirs, number=number, is_first=bool(is_first))

    def tell(self, opening: Opening, header: Sequence[int] = ()) -> None:
        """Send the call and the header of its batch to the other ranks of this pipeline. Raises PeerError."""
        flat = [opening.call, opening.number, opening.is_first, len(header), *header]
        parts = [flat[:_LENGTH] + [0] * (_LENGTH - len(flat)), *([flat[_LENGTH:]] if len(flat) > _LENGTH else [])]
        for part in parts:
            packed = torch.tensor(part, dtype=torch.int64, device=self._groups.comm_device)
            works = [
                (self._groups.transport().send([packed], peer, TAG_HEADER), peer) for peer in range(1, self._num_ranks)
            ]
            for work, peer in works:
                settle(work, peer)

    def refuse(self, opening: Opening, error: Exception) -> NoReturn:
        """Raise `error` on this rank, and a RemoteError on the others, in a first call of its kind."""
        if self._groups.pipeline_rank == 0:
            self.tell(opening)
        self._groups.agree(refusal=error)
        raise error

    def receive(self) -> Opening:
        """Return what the first rank tells next. Raises PeerError."""
        call, number, is_first, length, *header = self._receive(_LENGTH)
        if length > len(header):
            header += self._receive(length - len(header))
        return Opening(Call(call), number, bool(is_first), tuple(header[:length]))

    def _receive(self, length: int) -> list[int]:
        buffer = torch.empty(length, dtype=torch.int64, device=self._groups.comm_device)
        settle(self._groups.transport().recv([buffer], 0, TAG_HEADER), 0)
        return [int(value) for value in buffer.tolist()]
