"""`pipectl events`: what happened, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC

import click

from pipeapi.v1 import jobs_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address
from pipectl.errors import CommandError, Exit

HEADER = ("SEQ", "AT", "JOB", "NODE", "EVENT", "REASON")
WIDTHS = (8, 12, 14, 12, 20, 0)  # of lines that are printed one by one


@click.command()
@click.argument("job", required=False)
@click.option("--since", type=click.IntRange(min=0), default=0, metavar="SEQ", help="Begin after this event.")
@click.option("-f", "--follow", is_flag=True, help="Go on as events come, until JOB has ended.")
@click.option("-o", "--output", "form", type=click.Choice(["table", "json", "yaml"]), default="table")
@click.pass_obj
def events(coordinator: str | None, job: str | None, since: int, follow: bool, form: str) -> None:
    """Print the events of JOB, or of everything. With -f each is a line, as JSON too."""
    if follow and form == "yaml":
        raise CommandError("--follow prints lines: use -o table or -o json", Exit.USAGE)
    api = Coordinator(coordinator_address(coordinator))
    begin = since + 1 if since else 0
    if follow:
        _follow(api, job or "", begin, form)
        return
    found = list(_pages(api, job or "", begin))
    if form != "table":
        output.dump(found, form, single=False)
        return
    output.table(HEADER, [_row(each) for each in found])


def _pages(api: Coordinator, job: str, begin: int) -> Iterator[jobs_pb2.Event]:
    while True:
        page = list(api.call(api.jobs.Events, jobs_pb2.EventsRequest(job=job, from_event_seq=begin)).events)
        yield from page
        if not page:
            return
        begin = page[-1].event_seq + 1


def _follow(api: Coordinator, job: str, begin: int, form: str) -> None:
    if form == "table":
        _line(HEADER)
    for event in api.watch_events(job, begin):
        if form == "json":
            click.echo(json.dumps(output.to_dict(event)))
        else:
            _line(_row(event))


def _line(cells: tuple[object, ...]) -> None:
    shown = (output.safe(str(cell), keep="") for cell in cells)
    click.echo("  ".join(cell.ljust(width) for cell, width in zip(shown, WIDTHS, strict=True)).rstrip())


def _row(event: jobs_pb2.Event) -> tuple[object, ...]:
    return (
        event.event_seq,
        event.at.ToDatetime(tzinfo=UTC).astimezone().strftime("%H:%M:%S.%f")[:-3],
        event.job_id or "-",
        event.node_name or "-",
        event.name,
        event.reason,
    )
