"""Pictures of a timeline: text, SVG, and a trace for chrome://tracing or Perfetto. Draws, decides nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = {"F": "#4c8dd6", "B": "#5bb08a", "I": "#5bb08a", "W": "#c9a227"}
_ROW, _LEFT = 24, 64  # pixels


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action on one rank, in the caller's unit of time."""

    rank: int
    op: str
    stage: int
    chunk: int
    start: float
    end: float


def gantt(spans: Sequence[Span], *, width: int = 96, title: str = "") -> str:
    """Return one line per rank: digits are forwards, small letters backwards (B or I), capitals weight gradients.

    The mark is the chunk modulo 10 or 26, dots are bubbles.
    """
    if not spans:
        return title
    first, last = min(s.start for s in spans), max(s.end for s in spans)
    scale = width / (last - first) if last > first else 0.0
    rows: dict[int, list[str]] = {rank: ["·"] * width for rank in sorted({s.rank for s in spans})}
    for span in spans:
        letter = ord("A" if span.op == "W" else "a") + span.chunk % 26
        mark = str(span.chunk % 10) if span.op == "F" else chr(letter)
        left = min(int((span.start - first) * scale), width - 1)
        right = min(max(left + 1, int((span.end - first) * scale)), width)
        rows[span.rank][left:right] = [mark] * (right - left)
    return "\n".join(([title] if title else []) + [f"rank {rank:>2} │{''.join(row)}│" for rank, row in rows.items()])


def svg(spans: Sequence[Span], *, width: int = 1200, title: str = "") -> str:
    """Return the timeline as one SVG document, a row per rank, an action's name and times as its tooltip."""
    ranks = sorted({span.rank for span in spans})
    first, last = min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=1.0)
    scale = (width - _LEFT) / (last - first) if last > first else 0.0
    top = _ROW if title else 0
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + _ROW * len(ranks)}" '
        'font-family="sans-serif" font-size="11">'
    ]
    if title:
        lines.append(f'<text x="4" y="16">{escape(title)}</text>')
    for row, rank in enumerate(ranks):
        lines.append(f'<text x="4" y="{top + row * _ROW + 16}">rank {rank}</text>')
    for span in spans:
        x, y = _LEFT + (span.start - first) * scale, top + ranks.index(span.rank) * _ROW + 2
        wide = (span.end - span.start) * scale
        name = f"{span.stage}{span.op}{span.chunk}"
        label = f'<text x="{x + 2:.2f}" y="{y + 14}" fill="#fff">{span.chunk}</text>' if wide >= 14 else ""
        lines.append(
            f'<g><title>{name}: {span.start:g} to {span.end:g}</title><rect x="{x:.2f}" y="{y}" width="{wide:.2f}" '
            f'height="{_ROW - 4}" fill="{_COLOURS[span.op]}" stroke="#fff" stroke-width="0.5"/>{label}</g>'
        )
    return "\n".join([*lines, "</svg>\n"])


def chrome_trace(spans: Sequence[Span]) -> str:
    """Return the timeline as trace events, a process per rank and a thread per stage; one unit is one microsecond."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    events += [
        {
            "ph": "X",
            "name": f"{span.stage}{span.op}{span.chunk}",
            "cat": span.op,
            "pid": span.rank,
            "tid": span.stage,
            "ts": span.start,
            "dur": span.end - span.start,
            "args": {"stage": span.stage, "chunk": span.chunk},
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
