"""`pipectl demo`: the whole thing on this machine. A byte-level GPT in 4 stages on 2 nodes, watched to its end."""

from __future__ import annotations

import json
import re
import shutil
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import click

from pipeapi import jobproto, jobspec
from pipeapi.v1 import jobs_pb2
from pipectl import jobfile, output, pictures
from pipectl.api import Coordinator
from pipectl.commands import describe
from pipectl.errors import CommandError, Exit
from pipectl.interrupts import Interrupts
from pipectl.local_cluster import LocalCluster
from pipectl.pictures import Span

JOB = """\
version: 1
name: demo-gpt
program: stagekit.examples.gpt:Program
params: {{layers: 4, width: 128, sequence: 128, batch: 32, lr: 0.003}}
pipeline: {{stages: 4, schedule: 1f1b, chunks: 4, buckets: {{cap: 256KiB, first: 64KiB}}}}
train: {{steps: {steps}, seed: 1234, log_every: 20}}
observe: {{trace_steps: [{traced}]}}
"""


@click.command()
@click.option("--steps", default=180, show_default=True, type=click.IntRange(2), help="Training steps.")
def demo(steps: int) -> None:
    """Start a coordinator and 2 nodes here, train a small GPT in 4 stages on English text, show everything, clean up."""
    if not jobfile.has_torch():
        raise CommandError("the demo trains a model, but torch is not installed here", Exit.USAGE, "pip install torch")
    interrupts = Interrupts()
    cluster = LocalCluster(interrupts, nodes=2, slots=2)
    try:
        try:
            cluster.start()
            run(cluster, steps)
        finally:
            interrupts.end()  # a signal that comes before this has its effect still ends in the outer `finally`
    except KeyboardInterrupt:
        interrupts.end()
    finally:
        cluster.stop()
    if interrupts.has_come:
        output.note("\ninterrupted; every process was stopped and the temporary folder removed")
        sys.exit(int(Exit.DETACHED))


def run(cluster: LocalCluster, steps: int) -> None:
    """Submit, watch and report. Raises CommandError when the job does not succeed."""
    api = Coordinator(cluster.coordinator)
    click.echo(f"coordinator  {cluster.coordinator}   metrics http://{cluster.coordinator_http}/metrics")
    for n, address in enumerate(cluster.node_metrics()):
        click.echo(f"node{n}        2 slots             metrics http://{address}/metrics")
    traced = min(steps - 1, steps // 2)
    loaded = jobspec.load_text(JOB.format(steps=steps, traced=traced).encode(), "demo.yaml")
    job_id = api.submit(jobproto.to_proto(loaded, environ={}))
    click.echo(f"\nsubmitted    {job_id}: a GPT of 4 layers, 128 wide, in 4 stages on 2 nodes, {steps} steps\n")
    job = watch(api, job_id)
    if job.state != jobs_pb2.JOB_STATE_SUCCEEDED:
        log = api.get(job_id)
        raise CommandError(f"{job_id} ended {output.state_name(job)}\n{output.failure_text(log)}", Exit.JOB_FAILED)
    report(api, cluster, job_id, traced)


def watch(api: Coordinator, job_id: str) -> jobs_pb2.Job:
    """Show progress until the job ends; return its last state."""
    described, shown, job = False, "", jobs_pb2.Job()
    for job in api.watch(job_id):
        line = output.progress_line(job)
        if job.plan.stages and job.state == jobs_pb2.JOB_STATE_RUNNING and not described:
            _finish_line()
            describe.show(job)
            click.echo()
            described = True
        if line != shown:
            _progress(job, line)
            shown = line
    _finish_line()
    return job


def _progress(job: jobs_pb2.Job, line: str) -> None:
    if not sys.stdout.isatty():
        click.echo(line)
        return
    done = job.progress.step / job.progress.steps if job.progress.steps else 0.0
    bar = "█" * round(done * 30) + "░" * (30 - round(done * 30))
    click.echo(f"\r\033[K{bar} {line}", nl=False)


def _finish_line() -> None:
    if sys.stdout.isatty():
        click.echo()


def report(api: Coordinator, cluster: LocalCluster, job_id: str, traced: int) -> None:
    """Print the loss curve, the predicted and the measured timeline, where to look, and the final loss."""
    steps = read_lines(api.records(job_id, jobs_pb2.RECORD_KIND_STEPS))
    click.echo("\nloss by step\n" + pictures.curve([step["loss"] for step in steps]))
    width = max(40, min(120, shutil.get_terminal_size((100, 24)).columns - 14))
    predicted = predicted_spans(api.records(job_id, jobs_pb2.RECORD_KIND_PLAN))
    measured = measured_spans(read_lines(api.records(job_id, jobs_pb2.RECORD_KIND_TRACE)))
    for title, spans in (("predicted, a device per stage", predicted), (f"measured, step {traced}", measured)):
        length = max((s.end_s for s in spans), default=0.0) - min((s.start_s for s in spans), default=0.0)
        click.echo(
            f"\n{title}: {length * 1e3:.0f} ms, bubble {1 - pictures.busy_share(spans):.0%}  (0-9 forward, a-z backward, · idle)"
        )
        click.echo(pictures.gantt(spans, width=width))
    train_s = sum(step["duration_s"] for step in steps)
    loss, exported = steps[-1]["loss"], exported_loss(cluster, job_id)
    click.echo(
        "\nof a job of yours, while its coordinator runs: pipectl logs | events | describe JOB; metrics as named above"
    )
    click.echo(
        f"trained  {len(steps)} steps in {train_s:.1f} s, {sum(s['tokens'] for s in steps) / train_s / 1000:.1f}k tokens/s"
    )
    click.echo(f'metrics  piped_loss{{job_id="{job_id}"}} {exported}')
    click.echo(f"final loss {loss!r}")
    if exported != loss:
        raise CommandError(f"the exported loss {exported} is not the recorded one, {loss}", Exit.JOB_FAILED)


def read_lines(files: dict[int, bytes]) -> list[dict[str, Any]]:
    """Return the JSON lines of all ranks' files, in rank order."""
    return [json.loads(line) for rank in sorted(files) for line in files[rank].splitlines() if line]


def predicted_spans(files: dict[int, bytes]) -> list[Span]:
    """Return the compute spans that the plan predicts."""
    plan = json.loads(next(iter(files.values())))
    return [Span(s["rank"], s["op"], s["chunk"], s["start"], s["end"]) for s in plan["timeline"]["spans"]]


def measured_spans(events: Sequence[dict[str, Any]]) -> list[Span]:
    """Return the compute spans of a trace."""
    return [
        Span(e["rank"], e["op"], e["chunk"], e["start_ns"] * 1e-9, e["end_ns"] * 1e-9)
        for e in events
        if e["op"] in ("F", "B")
    ]


def exported_loss(cluster: LocalCluster, job_id: str) -> float | None:
    """Return piped_loss of the job as Prometheus reads it, from whichever node has it."""
    return next(_losses(cluster, job_id), None)


def _losses(cluster: LocalCluster, job_id: str) -> Iterator[float]:
    for address in cluster.node_metrics():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
            text = response.read().decode()
        for found in re.finditer(rf'^piped_loss{{[^}}]*job_id="{job_id}"[^}}]*}} (\S+)$', text, re.MULTILINE):
            yield float(found[1])
