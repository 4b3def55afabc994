"""`pipectl logs`: what workers wrote, as they wrote it."""

from __future__ import annotations

import sys

import click

from pipeapi.v1 import jobs_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address
from pipectl.errors import CommandError, Exit

_LINE_BYTES = 1 << 20  # longer lines are broken: a worker need not write any newline


@click.command()
@click.argument("job")
@click.option("--rank", "ranks", type=int, multiple=True, help="Only this rank (may be repeated).")
@click.option("--stage", type=int, help="Only the ranks that run this stage.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--tail", type=int, default=0, metavar="BYTES", help="Begin so far from the end.")
@click.pass_obj
def logs(coordinator: str | None, job: str, ranks: tuple[int, ...], stage: int | None, follow: bool, tail: int) -> None:
    """Print the output of JOB's workers; with several ranks, every line names its rank."""
    api = Coordinator(coordinator_address(coordinator))
    found = api.get(job)
    if follow and not found.workers:
        found = _once_started(api, found)
    wanted = list(ranks) or [w.rank for w in found.workers if stage is None or stage in w.stages]
    known = {worker.rank for worker in found.workers}
    if not found.workers:
        raise CommandError(f"{job} has not started: {output.progress_line(found)}", Exit.NOT_FOUND)
    if not wanted or not set(wanted) <= known:
        raise CommandError(f"{job} has the ranks {sorted(known)}, not what was asked for", Exit.NOT_FOUND)
    request = jobs_pb2.LogsRequest(job=found.job_id, ranks=wanted, follow=follow, tail_bytes=tail)
    rest: dict[int, bytes] = {}
    try:
        for part in api.stream(api.jobs.Logs, request):
            data = rest.pop(part.rank, b"") + part.data
            *lines, last = data.split(b"\n")
            for line in lines:
                _print(part.rank, line, prefix=len(wanted) > 1)
            while len(last) > _LINE_BYTES:
                _print(part.rank, last[:_LINE_BYTES], prefix=len(wanted) > 1)
                last = last[_LINE_BYTES:]
            if last:
                rest[part.rank] = last
    except KeyboardInterrupt:
        sys.exit(int(Exit.DETACHED))
    for rank, line in rest.items():
        _print(rank, line, prefix=len(wanted) > 1)


def _once_started(api: Coordinator, job: jobs_pb2.Job) -> jobs_pb2.Job:
    """Wait until the job has workers, or has ended without."""
    output.note(f"waiting for {job.name} to start ({output.progress_line(job)})")
    last = job
    for last in api.watch(job.job_id):
        if last.workers:
            break
    return last


def _print(rank: int, line: bytes, *, prefix: bool) -> None:
    text = output.safe(line.decode(errors="replace"), keep="\t")
    click.echo(f"[{rank}] {text}" if prefix else text)
