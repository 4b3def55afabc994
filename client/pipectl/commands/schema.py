"""`pipectl schema` and `pipectl explain`: the job file, for editors and for people."""

from __future__ import annotations

import json

import click

from pipeapi import jobspec
from pipectl import output
from pipectl.errors import CommandError, Exit

EXAMPLE = """\
version: 1
name: gpt
program: stagekit.examples.gpt:Program
params: {layers: 4, width: 128}
pipeline: {stages: 4, schedule: 1f1b, chunks: 4, split: balanced, buckets: {cap: 25MiB, first: 1MiB}}
train: {steps: 200, seed: 1234}
checkpoint: {dir: /tmp/gpt}
"""


@click.command()
@click.option("--example", is_flag=True, help="Print a job file to start from.")
def schema(example: bool) -> None:
    """Print the JSON Schema of the job file."""
    click.echo(EXAMPLE.rstrip() if example else json.dumps(jobspec.JobFile.model_json_schema(), indent=2))


@click.command()
@click.argument("field", default="")
def explain(field: str) -> None:
    """Explain FIELD of the job file, e.g. pipeline or pipeline.chunks; without one, the top level."""
    try:
        rows = jobspec.explain(field)
    except KeyError as error:
        raise CommandError(f"the job file has no field {error}", Exit.NOT_FOUND, "pipectl explain lists them") from None
    output.table(("FIELD", "TYPE", "DEFAULT", "DESCRIPTION"), rows)
