"""`pipectl get jobs | nodes`."""

from __future__ import annotations

from math import isnan

import click

from pipeapi.v1 import cluster_pb2, jobs_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address
from pipectl.errors import CommandError, Exit


@click.command()
@click.argument("kind", type=click.Choice(["jobs", "nodes"]))
@click.argument("name", required=False)
@click.option("-o", "--output", "form", type=click.Choice(["table", "wide", "json", "yaml", "name"]), default="table")
@click.pass_obj
def get(coordinator: str | None, kind: str, name: str | None, form: str) -> None:
    """List jobs or nodes, or show one by NAME or id."""
    api = Coordinator(coordinator_address(coordinator))
    if kind == "jobs":
        jobs = [api.get(name)] if name else list(api.call(api.jobs.List, jobs_pb2.ListRequest()).jobs)
        _show_jobs(jobs, form, single=name is not None)
        return
    nodes = [node for node in api.nodes() if name in (None, node.node_name, node.node_id)]
    if name and not nodes:
        raise CommandError(f"no node {name}", Exit.NOT_FOUND, "pipectl get nodes lists them")
    _show_nodes(nodes, form, single=name is not None)


def _show_jobs(jobs: list[jobs_pb2.Job], form: str, *, single: bool) -> None:
    if form in ("json", "yaml"):
        output.dump(jobs, form, single=single)
    elif form == "name":
        for job in jobs:
            click.echo(job.job_id)
    else:
        header = ["JOB", "NAME", "STATE", "STEP", "LOSS", "ATTEMPT", "AGE"]
        header += ["TENANT", "PRIORITY", "STAGES", "REPLICAS", "SCHEDULE", "REASON"] if form == "wide" else []
        output.table(header, [_job_row(job, wide=form == "wide") for job in jobs])


def _job_row(job: jobs_pb2.Job, *, wide: bool) -> list[object]:
    progress = job.progress
    row: list[object] = [
        job.job_id,
        job.name,
        output.state_name(job),
        f"{output.num_steps(job)}/{job.spec.train.steps}",
        f"{progress.loss:.4f}" if progress.step and not isnan(progress.loss) else "-",
        job.attempt,
        output.age(job.submitted_at),
    ]
    if wide:
        pipeline = job.spec.pipeline
        row += [
            job.spec.tenant or "default",
            job.spec.priority,
            pipeline.stages,
            pipeline.replicas,
            pipeline.schedule,
            _why(job),
        ]
    return row


def _why(job: jobs_pb2.Job) -> str:
    failure = output.failure_text(job).partition("\n")[0] if job.HasField("failure") else ""
    return job.pending_reason or failure or "-"


def _show_nodes(nodes: list[cluster_pb2.Node], form: str, *, single: bool) -> None:
    if form in ("json", "yaml"):
        output.dump(nodes, form, single=single)
    elif form == "name":
        for node in nodes:
            click.echo(node.node_name)
    else:
        header = ["NODE", "STATE", "SLOTS", "USED", "LEASE AGE", "NEW WORK"]
        header += ["CLOCK", "SLOWEST WIRE", "LABELS", "VERSION", "DATA", "METRICS", "ID"] if form == "wide" else []
        rows = []
        for node in nodes:
            row: list[object] = [node.node_name, output.node_state_name(node), len(node.slots), node.slots_used]
            row += [f"{node.lease_age_s:.1f}s", output.node_flags(node)]
            if form == "wide":
                labels = ",".join(f"{name}={value}" for name, value in sorted(node.labels.items()))
                row += [
                    output.clock(node),
                    output.slowest_wire(node),
                    labels or "-",
                    node.version,
                    node.data_address,
                    node.metrics_address,
                    node.node_id,
                ]
            rows.append(row)
        output.table(header, rows)
