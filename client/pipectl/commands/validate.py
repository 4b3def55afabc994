"""`pipectl validate`: check job files."""

from __future__ import annotations

import sys

import click

from pipectl import jobfile, output
from pipectl.errors import CommandError, Exit


@click.command()
@click.argument("specs", nargs=-1, required=True)
@click.option("--deep", is_flag=True, help="Also build, capture and cut the model (needs torch).")
def validate(specs: tuple[str, ...], deep: bool) -> None:
    """Check the job files SPECS without a coordinator; all mistakes of all files are printed."""
    if deep and not jobfile.has_torch():
        raise CommandError("--deep builds the model, but torch is not installed here", Exit.USAGE, "pip install torch")
    failed = False
    for spec in specs:
        try:
            loaded = jobfile.load(spec)
            if deep:
                jobfile.describe(loaded, quick=True)
        except CommandError as error:
            error.show()
            failed = True
        else:
            output.note(f"{spec}: ok")
    if failed:
        sys.exit(int(Exit.USAGE))
