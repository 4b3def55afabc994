"""`pipectl version`."""

from __future__ import annotations

from importlib.metadata import version as installed

import click

from pipeapi.v1 import cluster_pb2
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address


@click.command()
@click.option("--client", is_flag=True, help="Do not ask the coordinator.")
@click.pass_obj
def version(coordinator: str | None, client: bool) -> None:
    """Print versions of client and coordinator."""
    click.echo(f"client       {installed('pipectl')}")
    if client:
        return
    api = Coordinator(coordinator_address(coordinator))
    reply = api.call(api.cluster.GetVersion, cluster_pb2.GetVersionRequest())
    click.echo(f"coordinator  {reply.version} at {api.address}")
    output.note(f"cluster {reply.cluster_id}, epoch {reply.coordinator_epoch}, http {reply.http_address}")
