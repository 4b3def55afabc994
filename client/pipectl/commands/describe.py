"""`pipectl describe`: everything about one job."""

from __future__ import annotations

import click

from pipeapi.v1 import cluster_pb2, jobs_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address

_ON_NODES = (
    jobs_pb2.JOB_STATE_STARTING,
    jobs_pb2.JOB_STATE_RUNNING,
    jobs_pb2.JOB_STATE_PREEMPTING,
    jobs_pb2.JOB_STATE_CANCELLING,
)


@click.command()
@click.argument("job")
@click.pass_obj
def describe(coordinator: str | None, job: str) -> None:
    """Show JOB: its state, where every stage runs, its buckets, and why it failed."""
    api = Coordinator(coordinator_address(coordinator))
    found = api.get(job)
    show(found)
    if found.state == jobs_pb2.JOB_STATE_FAILED and found.attempt:
        request = jobs_pb2.FailureReportRequest(job=found.job_id)
        show_report(api.call(api.jobs.FailureReport, request))
    if found.state in _ON_NODES:
        _warn_of_silent_nodes(found, api.nodes())


def _warn_of_silent_nodes(job: jobs_pb2.Job, nodes: list[cluster_pb2.Node]) -> None:
    here = {worker.node_id for worker in job.workers}
    for node in nodes:
        if node.node_id in here and node.state != cluster_pb2.NODE_STATE_READY:
            output.note(
                f"warning: node {node.node_name} is {output.node_state_name(node)}, silent for {node.lease_age_s:.0f} s: "
                "its workers are shown as it last reported them; they may be running, or gone with their machine"
            )


def show(job: jobs_pb2.Job) -> None:
    """Print a job."""
    pipeline, train = job.spec.pipeline, job.spec.train
    facts = [
        ("Job", job.job_id),
        ("Name", job.name),
        ("Tenant", job.spec.tenant or "default"),
        ("State", output.progress_line(job)),
        ("Attempt", _attempt(job)),
        ("Program", job.spec.program),
        (
            "Pipeline",
            f"{pipeline.stages} stages × {pipeline.replicas} replicas, {pipeline.schedule}, {pipeline.chunks or 'auto'} chunks",
        ),
        ("Priority", f"{job.spec.priority}"),
        ("Training", f"{train.steps} steps, seed {train.seed}"),
    ]
    if job.plan.stages:
        plan = job.plan
        if pipeline.schedule == "auto" or not pipeline.chunks:
            facts.append(("Chosen", f"{plan.schedule}, {plan.num_chunks} chunks"))
        facts.append(
            ("Expected", f"{plan.expected_step_s * 1e3:.1f} ms a step, bubble {plan.expected_bubble_ratio:.1%}")
        )
        facts.append(("Bit-equal", f"{plan.bit_equal} (graph {plan.graph_hash[:12]})"))
    for label, value in facts:
        click.echo(f"{label + ':':<11}{output.safe(str(value))}")
    if job.workers:
        click.echo()
        _show_placement(job)
    if job.plan.stages:
        click.echo()
        _show_stages(job.plan)
    if job.HasField("failure"):
        click.echo(f"\nFailure:   {output.failure_text(job)}")


def _attempt(job: jobs_pb2.Job) -> str:
    """Return which attempt it is, and how many of its restarts are used."""
    told = f"{job.attempt} (fence {job.fence})" if job.attempt else "none yet"
    return f"{told}, {job.restarts_used} of {job.spec.restarts} restarts used" if job.spec.restarts else told


def show_report(report: jobs_pb2.FailureReportResponse) -> None:
    """Print how an attempt ended, and every rank's part in it."""
    click.echo(
        f"\nAttempt {report.attempt} {report.outcome}{'' if report.final else ' (so far)'}: {output.safe(report.stop_trigger)}"
    )
    rows = []
    for each in report.ranks:
        role = jobs_pb2.RankRole.Name(each.role).removeprefix("RANK_ROLE_")
        role += f" of rank {each.peer_rank}" if each.peer_rank >= 0 and each.role == jobs_pb2.RANK_ROLE_VICTIM else ""
        stages = ",".join(map(str, each.stages))
        rows.append((each.rank, stages, each.node_name, role, each.step if each.step >= 0 else "-", each.message))
    output.table(("RANK", "STAGES", "NODE", "PART", "STEP", "WHAT"), rows)


def _show_placement(job: jobs_pb2.Job) -> None:
    rows = [
        (
            stage,
            worker.rank,
            worker.replica,
            worker.node_name,
            worker.device,
            output.worker_state_name(worker),
            worker.pid or "-",
        )
        for worker in sorted(job.workers, key=lambda w: (min(w.stages, default=0), w.replica))
        for stage in worker.stages
    ]
    output.table(("STAGE", "RANK", "REPLICA", "NODE", "DEVICE", "STATE", "PID"), rows)


def _show_stages(plan: jobs_pb2.PlanSummary) -> None:
    rows = []
    for stage in plan.stages:
        head = (stage.index, stage.begins_at, stage.num_parameters, output.size(stage.parameter_bytes))
        times = (f"{stage.forward_s * 1e3:.1f}", f"{stage.backward_s * 1e3:.1f}", stage.compile)
        rows.append((*head, *times, len(stage.buckets)))
    header = ("STAGE", "BEGINS AT", "PARAMETERS", "BYTES", "FORWARD ms", "BACKWARD ms", "COMPILE", "BUCKETS")
    output.table(header, rows)
    click.echo()
    output.table(
        ("STAGE", "BUCKET", "BYTES", "PARAMETERS"),
        [
            (stage.index, number, output.size(bucket.size_bytes), _names(list(bucket.parameters)))
            for stage in plan.stages
            for number, bucket in enumerate(stage.buckets)
        ],
    )


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})"
