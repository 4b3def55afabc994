"""`pipectl plan`: plan a job on this machine and show the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from pipectl import jobfile, output
from pipectl.errors import CommandError, Exit

RUNNERS_UP = 5


@click.command()
@click.argument("spec")
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help="Override a field: pipeline.stages=2.")
@click.option(
    "-o", "--output", "form", type=click.Choice(["text", "json"]), default="text", help="json: the whole plan."
)
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@click.option("--traceback", is_flag=True, help="On failure, show the program's whole traceback.")
def plan(spec: str, sets: tuple[str, ...], form: str, as_json: bool, traceback: bool) -> None:
    """Build, capture, measure, cut and schedule the model of SPEC; nothing is submitted."""
    if not jobfile.has_torch():
        raise CommandError("a plan builds the model, but torch is not installed here", Exit.USAGE, "pip install torch")
    document = jobfile.describe(jobfile.load(spec, sets), quick=False, traceback=traceback)
    ranking = document.get("ranking")
    if as_json or form == "json":
        click.echo(json.dumps({**document["plan"], "ranking": ranking}, indent=1))
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
    if ranking:
        _show_ranking(ranking)


def _show_ranking(ranking: Mapping[str, Any]) -> None:
    """Print the plan beside what else could run on as many ranks, where its time goes, and what can't be and why."""
    plans = ranking["plans"]
    rows = [
        (
            "→" if number == 0 else "",
            _name(each),
            each["stages_per_rank"],
            each["chunks"],
            f"{each['step_s'] * 1e3:.1f}",
            f"{each['bubble']:.1%}",
            output.size(max(each["rank_bytes"], default=0)),
            f"{each['gap']:.1%}",
        )
        for number, each in enumerate(plans[: 1 + RUNNERS_UP])
    ]
    click.echo()
    output.table(("", "SCHEDULE", "STAGES/RANK", "CHUNKS", "STEP ms", "BUBBLE", "MEMORY/RANK", "ABOVE BOUND"), rows)
    parts = ranking["limited_by"]
    click.echo(
        f"\nno plan on these ranks can take less than {ranking['bound_s'] * 1e3:.1f} ms; of {plans[0]['step_s'] * 1e3:.1f} ms, "
        f"{parts['work_s'] * 1e3:.1f} are a rank's mean work, {parts['uneven_s'] * 1e3:.1f} uneven ranks, "
        f"{parts['transfers_s'] * 1e3:.1f} transfers, {parts['fill_and_drain_s'] * 1e3:.1f} filling and draining"
    )
    memory = ", ".join(output.size(size) for size in plans[0]["rank_bytes"])
    click.echo(f"memory per rank: {memory}")
    for each in ranking["refused"]:
        click.echo(f"not possible: {'; '.join(each['plans'])}: {each['reason']}")


def _name(row: Mapping[str, Any]) -> str:
    limit = row["memory_limit"]
    return row["schedule"] if limit is None else f"{row['schedule']} (≤ {limit:g})"
