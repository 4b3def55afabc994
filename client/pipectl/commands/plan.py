"""`pipectl plan`: plan a job on this machine and show the plan."""

from __future__ import annotations

import json

import click

from pipectl import jobfile, output
from pipectl.errors import CommandError, Exit


@click.command()
@click.argument("spec")
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help="Override a field: pipeline.stages=2.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole plan.")
@click.option("--traceback", is_flag=True, help="On failure, show the program's whole traceback.")
def plan(spec: str, sets: tuple[str, ...], as_json: bool, traceback: bool) -> None:
    """Build, capture, measure, cut and schedule the model of SPEC; nothing is submitted."""
    if not jobfile.has_torch():
        raise CommandError("a plan builds the model, but torch is not installed here", Exit.USAGE, "pip install torch")
    document = jobfile.describe(jobfile.load(spec, sets), quick=False, traceback=traceback)
    if as_json:
        click.echo(json.dumps(document["plan"], indent=1))
        return
    model = document["plan"]["model"]
    rows = [
        (
            stage["index"],
            stage["begins_at"],
            output.size(sum(p["size_bytes"] for p in stage["parameters"])),
            len(stage["buckets"]),
            f"{stage['forward_s'] * 1e3:.1f}",
            f"{stage['backward_s'] * 1e3:.1f}",
        )
        for stage in model["stages"]
    ]
    output.table(("STAGE", "BEGINS AT", "PARAMETERS", "BUCKETS", "FORWARD ms", "BACKWARD ms"), rows)
    click.echo(
        f"\n{model['split_report']}\nstart values: {model['start_values']}\nself-check: {model['self_check']}; bit-equal: {document['plan']['bit_equal']}\n"
    )
    for fixed in model["fixed"]:
        name = model["inputs"][fixed["graph_input"]]["name"]
        click.echo(f"{name}, dimension {fixed['dim']}: every chunk needs the example's size, because {fixed['reason']}")
    click.echo(document["picture"])
