"""Actions: what a schedule is made of, and their text form.

An action is (op, stage, chunk) and, for a transfer, the stage at its other end. The text form is torch's
("2F0", "3SEND_F1"); a transfer that skips stages names its peer: "0SEND_F1>3". Pure data.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from stagekit.errors import ScheduleError


class Op(StrEnum):
    """What an action does. Transfers name data by direction: F activations, B gradients, X inputs and targets."""

    F = "F"  # forward
    B = "B"  # full backward: what I and W do, at once
    I = "I"  # noqa: E741  # input gradient: what the stage before waits for
    W = "W"  # weight gradient: nobody waits for it
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    SEND_X = "SEND_X"  # whole graph inputs or the target, from the rank that owns them
    RECV_X = "RECV_X"
    REDUCE = "REDUCE"  # wait until the stage's gradients are summed over its replicas
    TIE_SUM = "TIE_SUM"  # sum the gradients of weights that several stages hold


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.SEND_X})
RECVS = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_X})
MATCHING_SEND = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B, Op.RECV_X: Op.SEND_X}


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list; `peer` is the stage at the other end of a transfer, None for compute."""

    op: Op
    stage: int
    chunk: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.op}{self.chunk}"
        return text if self.peer is None or self.peer == default_peer(self.op, self.stage) else f"{text}>{self.peer}"


def default_peer(op: Op, stage: int) -> int | None:
    """Return the neighbour that torch's text form implies, None for compute."""
    if op in (Op.SEND_F, Op.RECV_B):
        return stage + 1
    return stage - 1 if op in (Op.RECV_F, Op.SEND_B) else None


_TEXT = re.compile(r"^(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|SEND_X|RECV_X|REDUCE|TIE_SUM|F|B|I|W)(\d+)(?:>(\d+))?$")


def parse_action(text: str) -> Action:
    """Return the action that `text` says. Raises ScheduleError for anything else."""
    match = _TEXT.match(text.strip())
    if not match:
        raise ScheduleError(f'"{text}" is no action; write e.g. 2F0, 0B3, 1SEND_F2, 0SEND_F2>3')
    op, stage = Op(match[2]), int(match[1])
    return Action(op, stage, int(match[3]), int(match[4]) if match[4] else default_peer(op, stage))


def to_csv(actions: Sequence[Sequence[Action]]) -> str:
    """Return one line per rank, actions separated by commas."""
    return "".join(",".join(map(str, row)) + "\n" for row in actions)


def from_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return the lists of all ranks; empty cells are skipped. Raises ScheduleError."""
    return tuple(
        tuple(parse_action(cell) for cell in line.split(",") if cell.strip())
        for line in text.splitlines()
        if line.strip()
    )
