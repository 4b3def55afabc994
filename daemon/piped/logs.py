"""Logging of the daemons: structlog, one line per state change, on stderr.

JSON where stderr is no terminal (so that no value can forge a line), else readable columns. `piped.__main__` calls
`configure` once; everybody else takes `structlog.get_logger()`.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure(*, level: str = "info") -> None:
    """Send every event of at least `level` to stderr."""
    is_terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if is_terminal:
        shared.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    else:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)  # locals hold secrets of jobs
        shared += [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # whatever it is by then
    )
