"""The rank × step grid of action lists, with an arrow at a cell: how an error shows where it is."""

from __future__ import annotations

from collections.abc import Sequence

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action
from stagekit.plan.dependencies import Cell


def grid(lists: Sequence[Sequence[Action]], cell: Cell | None = None, *, width: int = 12) -> str:
    """Return the rank × step grid as text, `width` cells around `cell`, which an arrow marks."""
    start = max(0, cell[1] - width // 2) if cell else 0
    rows = []
    for rank, row in enumerate(lists):
        shown = [
            ("→" if (rank, position) == cell else "") + str(action)
            for position, action in enumerate(row[start : start + width], start)
        ]
        if cell and cell[0] == rank and cell[1] >= len(row):
            shown.append("→(end)")
        rows.append(shown)
    wide = max((len(text) for row in rows for text in row), default=1)
    head = "…" if start else " "
    return "\n".join(f"rank {rank:>3} {head} " + " ".join(t.ljust(wide) for t in row) for rank, row in enumerate(rows))


def refusal(lists: Sequence[Sequence[Action]], cell: Cell, message: str, cycle: Sequence[str] = ()) -> ScheduleError:
    """Return the error that says `message` and shows `cell`."""
    return ScheduleError(f"{message} (rank {cell[0]}, step {cell[1]})\n{grid(lists, cell)}", cycle=cycle)
