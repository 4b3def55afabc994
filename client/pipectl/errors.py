"""How a command ends: exit codes, and errors that become two lines on stderr."""

from __future__ import annotations

from enum import IntEnum

import click


class Exit(IntEnum):
    """Exit codes of pipectl."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    DENIED = 5
    UNSCHEDULABLE = 6
    CONFLICT = 7
    CANCELLED = 8
    TIMEOUT = 124
    DETACHED = 130


class CommandError(click.ClickException):
    """Ends the command: `error: …`, `hint: …`, and an exit code."""

    def __init__(self, message: str, code: Exit, hint: str = "") -> None:
        super().__init__(message)
        self.exit_code = int(code)  # type: ignore[misc]  # click declares it on the class, reads it off the instance
        self.hint = hint

    def show(self, file: object = None) -> None:
        """Print both lines to stderr; a message that starts with "error:" is printed as it is."""
        text = self.message if self.message.startswith("error:") else f"error: {self.message}"
        click.echo(text, err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)
