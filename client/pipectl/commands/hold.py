"""`pipectl hold | release`: keep a queued job where it is."""

from __future__ import annotations

import click

from pipeapi.v1 import jobs_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address, whoami


@click.command()
@click.argument("job")
@click.option("--why", default="", metavar="TEXT", help="Shown to whoever asks why it waits.")
@click.pass_obj
def hold(coordinator: str | None, job: str, why: str) -> None:
    """Keep JOB, which is queued, from being placed until it is released."""
    api = Coordinator(coordinator_address(coordinator))
    reply = api.call(api.jobs.Hold, jobs_pb2.HoldRequest(job=job, who=whoami(), why=why))
    output.note(f"{reply.job.job_id}: {output.progress_line(reply.job)}")


@click.command()
@click.argument("job")
@click.pass_obj
def release(coordinator: str | None, job: str) -> None:
    """Let JOB be placed again; it keeps its place in the queue. One that is not held is left alone."""
    api = Coordinator(coordinator_address(coordinator))
    reply = api.call(api.jobs.Release, jobs_pb2.ReleaseRequest(job=job, who=whoami()))
    output.note(f"{reply.job.job_id}: {output.progress_line(reply.job)}")
