"""`pipectl events`: what happened, in order."""

from __future__ import annotations

from datetime import UTC

import click

from pipeapi.v1 import jobs_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address


@click.command()
@click.argument("job", required=False)
@click.option("--since", type=int, default=0, metavar="SEQ", help="Begin after this event.")
@click.option("-o", "--output", "form", type=click.Choice(["table", "json", "yaml"]), default="table")
@click.pass_obj
def events(coordinator: str | None, job: str | None, since: int, form: str) -> None:
    """Print the events of JOB, or of everything."""
    api = Coordinator(coordinator_address(coordinator))
    request = jobs_pb2.EventsRequest(job=job or "", from_event_seq=since)
    found = list(api.call(api.jobs.Events, request).events)
    if form != "table":
        output.dump(found, form, single=False)
        return
    rows = [
        (
            event.event_seq,
            event.at.ToDatetime(tzinfo=UTC).astimezone().strftime("%H:%M:%S.%f")[:-3],
            event.job_id or "-",
            event.node_name or "-",
            event.name,
            event.reason,
        )
        for event in found
    ]
    output.table(("SEQ", "AT", "JOB", "NODE", "EVENT", "REASON"), rows)
