"""Actions: what a schedule is made of, and their text form.

An action is (op, stage, chunk) and, for a transfer, the stage at its other end. The text form is torch's
("2F0", "3SEND_F1"); a transfer that skips stages names its peer: "0SEND_F1>3". Pure data.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

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


class Action(NamedTuple):
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
    if match[4] and op not in SENDS and op not in RECVS:
        raise ScheduleError(f'"{text}" is no action: {op} has nothing at its other end; write {stage}{op}{match[3]}')
    return Action(op, stage, int(match[3]), int(match[4]) if match[4] else default_peer(op, stage))


def to_csv(actions: Sequence[Sequence[Action]], *, overlapped: bool = False) -> str:
    """Return one line per rank, actions separated by commas: what torch.distributed.pipelining reads, too.

    `overlapped` writes each F with the backward behind it as one "(0F5;3B2)OVERLAP_F_B", of another stage or chunk; that
    is meant for lists without transfers.
    """
    rows = []
    for row in actions:
        cells: list[str] = []
        for number, action in enumerate(row):
            before = row[number - 1] if number else action
            if overlapped and cells and not cells[-1].startswith("(") and _overlaps(before, action):
                cells[-1] = f"({before};{action})OVERLAP_F_B"
            else:
                cells.append(str(action))
        rows.append(",".join(cells) + "\n")
    return "".join(rows)


def _overlaps(first: Action, second: Action) -> bool:
    return first.op is Op.F and second.op in (Op.B, Op.I) and first.stage != second.stage


def from_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return the lists of all ranks.

    Empty cells are torch's bubbles and skipped, and so is what torch lists for sharded parameters (UNSHARD, RESHARD,
    REDUCE_GRAD); an OVERLAP_F_B pair is its two actions. Raises ScheduleError with the line and the cell.
    """
    rows = []
    for number, line in enumerate(filter(str.strip, text.splitlines())):
        row: list[Action] = []
        for place, cell in enumerate(line.split(",")):
            try:
                row += map(parse_action, _parts(cell.strip().strip('"')))
            except ScheduleError as error:
                raise ScheduleError(f"rank {number}, cell {place}: {error}") from error
        rows.append(tuple(row))
    return tuple(rows)


_PAIR = re.compile(r"^\(([^()]*)\)OVERLAP_F_B$")
_SHARDING = re.compile(r"^\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*$")


def _parts(cell: str) -> list[str]:
    """Return the actions of a cell as texts."""
    if not cell or _SHARDING.match(cell):
        return []
    pair = _PAIR.match(cell)
    return pair[1].split(";") if pair else [cell]
