"""`pipectl wait`: follow a job to its end."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from pipeapi.v1 import jobs_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address
from pipectl.errors import CommandError, Exit

_ENDS = {
    jobs_pb2.JOB_STATE_SUCCEEDED: Exit.OK,
    jobs_pb2.JOB_STATE_FAILED: Exit.JOB_FAILED,
    jobs_pb2.JOB_STATE_CANCELLED: Exit.CANCELLED,
}


@click.command()
@click.argument("job")
@click.option("--for", "goal", type=click.Choice(["done", "running"]), default="done", help="What to wait for.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up after so long (exit 124).")
@click.pass_obj
def wait(coordinator: str | None, job: str, goal: str, timeout: float | None) -> None:
    """Wait for JOB: exit 0 succeeded, 1 failed, 8 cancelled, 124 timeout."""
    api = Coordinator(coordinator_address(coordinator))
    job_id = api.get(job).job_id
    if timeout is not None:
        _set_alarm(timeout, job)
    follow(api, job_id, goal=goal)


def follow(api: Coordinator, job_id: str, *, goal: str = "done") -> None:
    """Print progress lines until the job reaches `goal`, then leave with the exit code that its end means."""
    shown = ""
    try:
        for job in api.watch(job_id):
            line = output.progress_line(job)
            if line != shown:
                output.note(line)
                shown = line
            if goal == "running" and job.state == jobs_pb2.JOB_STATE_RUNNING:
                return
            if job.state in _ENDS:
                if job.state == jobs_pb2.JOB_STATE_FAILED:
                    output.note(output.failure_text(job))
                sys.exit(int(_ENDS[job.state]))
    except KeyboardInterrupt:
        output.note(f"detached; the job goes on. pipectl wait {job_id} comes back to it")
        sys.exit(int(Exit.DETACHED))


def _set_alarm(seconds: float, job: str) -> None:
    def expired(_number: int, _frame: FrameType | None) -> None:
        raise CommandError(f"{job} did not get there within {seconds:g} s", Exit.TIMEOUT)

    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, expired)
        signal.setitimer(signal.ITIMER_REAL, seconds)
