"""`pipectl cancel`."""

from __future__ import annotations

import click

from pipeapi.v1 import jobs_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address


@click.command()
@click.argument("job")
@click.pass_obj
def cancel(coordinator: str | None, job: str) -> None:
    """Cancel JOB; cancelling one that has ended changes nothing."""
    api = Coordinator(coordinator_address(coordinator))
    reply = api.call(api.jobs.Cancel, jobs_pb2.CancelRequest(job=job))
    output.note(f"{reply.job.job_id}: {output.progress_line(reply.job)}")
