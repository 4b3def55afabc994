"""`pipectl submit`: check a job file, upload its source, submit it once."""

from __future__ import annotations

import click

from pipeapi.v1 import jobs_pb2, spec_pb2
from pipectl import jobfile, output
from pipectl.api import Coordinator
from pipectl.commands.wait import follow
from pipectl.context import coordinator_address


@click.command()
@click.argument("spec")
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help="Override a field: pipeline.stages=2.")
@click.option(
    "--env", "envs", multiple=True, metavar="K[=V]", help="Add to the workers' environment; K alone is a secret."
)
@click.option("--wait", is_flag=True, help="Stay, show progress, and end with the job's exit code.")
@click.option("--detach", is_flag=True, help="Return at once (the default).")
@click.option("--dry-run", is_flag=True, help="Check everything, submit nothing.")
@click.option("--check/--no-check", default=True, help="Build, capture and cut the model here first, if torch is here.")
@click.pass_obj
def submit(
    coordinator: str | None,
    spec: str,
    sets: tuple[str, ...],
    envs: tuple[str, ...],
    wait: bool,
    detach: bool,
    dry_run: bool,
    check: bool,
) -> None:
    """Submit the job file SPEC; prints the job's id."""
    if wait and detach:
        raise click.UsageError("--wait and --detach exclude each other")
    loaded = jobfile.load(spec, sets, envs)
    api = Coordinator(coordinator_address(coordinator))
    unpacked = spec_pb2.JobSpec()
    unpacked.CopyFrom(loaded.spec)
    unpacked.source_sha256 = ""  # uploaded once everything else is right
    reply = api.call(api.jobs.Validate, jobs_pb2.ValidateRequest(spec=unpacked))
    if check and jobfile.has_torch():
        jobfile.describe(loaded, quick=True)
    for warning in reply.warnings:
        output.note(f"warning: {output.safe(warning)}")
    if dry_run:
        output.note(f"{spec}: ok, not submitted")
        return
    if loaded.archive is not None:
        api.upload(loaded.spec.source_sha256, loaded.archive)
    job_id = api.submit(loaded.spec)
    click.echo(job_id)
    if wait:
        follow(api, job_id)
    output.note(
        f"submitted {loaded.spec.name}; pipectl wait {job_id} follows it, pipectl logs -f {job_id} shows its output"
    )
