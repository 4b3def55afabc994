"""Pictures for a terminal: a curve, and a Gantt chart of stages × time. Pure: text out of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_DOTS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action of one rank, in seconds."""

    rank: int
    op: str  # "F" or "B"
    chunk: int
    start_s: float
    end_s: float


def curve(values: Sequence[float], *, width: int = 72, height: int = 8) -> str:
    """Return `values` (at least one) as a block chart with its first, last and extreme values."""
    columns = min(width, len(values))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : max(1, (column + 1) * len(values) // columns)]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    scale = (height * 8 - 1) / (high - low) if high > low else 0.0
    levels = [round((mean - low) * scale) + 1 for mean in means]
    lines = []
    for row in range(height - 1, -1, -1):
        label = high if row == height - 1 else low if row == 0 else None
        cells = "".join(_DOTS[max(0, min(8, level - row * 8))] for level in levels)
        lines.append(f"{label:7.3f} ┤{cells}" if label is not None else f"        │{cells}")
    lines.append(
        f"        └{'─' * columns}\n         1{' ' * max(1, columns - 1 - len(str(len(values))))}{len(values)}"
    )
    return "\n".join(lines)


def gantt(spans: Sequence[Span], *, width: int = 88, over_s: float | None = None) -> str:
    """Return one line per rank: digits are forwards of that chunk, letters backwards, dots idle.

    `over_s` is the time that the whole width stands for, so that two charts can share a scale.
    """
    if not spans:
        return "(nothing was recorded)"
    first = min(span.start_s for span in spans)
    total = over_s or max(span.end_s for span in spans) - first
    lines = []
    for rank in sorted({span.rank for span in spans}):
        row = ["·"] * width
        for span in spans:
            if span.rank == rank:
                left = min(width - 1, int((span.start_s - first) / total * width))
                right = min(width, max(left + 1, int((span.end_s - first) / total * width)))
                mark = str(span.chunk % 10) if span.op == "F" else chr(ord("a") + span.chunk % 26)
                row[left:right] = mark * (right - left)
        lines.append(f"  rank {rank} │{''.join(row)}│")
    return "\n".join(lines)


def busy_share(spans: Sequence[Span]) -> float:
    """Return the share of ranks × time in which something was computed."""
    if not spans:
        return 0.0
    length = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    busy = sum(span.end_s - span.start_s for span in spans)
    return busy / (length * len({span.rank for span in spans})) if length else 0.0
