"""`pipectl cordon | uncordon | drain | forget`: what an operator does with a node."""

from __future__ import annotations

import sys
import time

import click

from pipeapi.v1 import cluster_pb2
from pipeapi.values import parse_duration
from pipectl import output
from pipectl.api import Coordinator
from pipectl.context import coordinator_address, whoami
from pipectl.errors import CommandError, Exit

POLL_S = 0.5
_why = click.option("--why", default="", metavar="TEXT", help="Shown to whoever lists the nodes.")


@click.command()
@click.argument("node")
@_why
@click.pass_obj
def cordon(coordinator: str | None, node: str, why: str) -> None:
    """Give NODE no new work; what runs there goes on."""
    api = Coordinator(coordinator_address(coordinator))
    request = cluster_pb2.CordonNodeRequest(node=node, who=whoami(), why=why)
    _told(api.call(api.cluster.CordonNode, request).node)


@click.command()
@click.argument("node")
@click.pass_obj
def uncordon(coordinator: str | None, node: str) -> None:
    """Open NODE to new work again: ends a cordon, a drain (what it stopped stays stopped), a quarantine."""
    api = Coordinator(coordinator_address(coordinator))
    _told(api.call(api.cluster.UncordonNode, cluster_pb2.UncordonNodeRequest(node=node, who=whoami())).node)


@click.command()
@click.argument("node")
@click.option("--deadline", required=True, metavar="TIME", help="30m, 2h; 0: stop what runs now, with its grace.")
@click.option("--detach", is_flag=True, help="Return at once; the drain goes on.")
@_why
@click.pass_obj
def drain(coordinator: str | None, node: str, deadline: str, detach: bool, why: str) -> None:
    """Empty NODE and wait until it is: exit 0 means that nothing of any job is left there.

    Jobs may finish until the deadline; then they are stopped with their grace and go back to the queue.
    """
    try:
        within_s = parse_duration(f"{deadline}s" if deadline.isdigit() else deadline)
        assert isinstance(within_s, int)
    except ValueError as error:
        raise CommandError(f"--deadline: {error}", Exit.USAGE) from None
    api = Coordinator(coordinator_address(coordinator))
    request = cluster_pb2.DrainNodeRequest(node=node, who=whoami(), why=why, within_s=within_s)
    found = api.call(api.cluster.DrainNode, request).node
    if detach:
        _told(found)
        return
    _follow(api, found)


@click.command()
@click.argument("node")
@_why
@click.pass_obj
def forget(coordinator: str | None, node: str, why: str) -> None:
    """Free the slots of NODE, which is LOST and will not come back.

    Ranks that ran there count as lost, so their jobs start anew elsewhere. Never forget a node that may still run something: its workers
    would go on unseen. If it comes back all the same, they are stopped.
    """
    api = Coordinator(coordinator_address(coordinator))
    request = cluster_pb2.ForgetNodeRequest(node=node, who=whoami(), why=why)
    found = api.call(api.cluster.ForgetNode, request).node
    output.note(f"{output.safe(found.node_name)} ({found.node_id}) is forgotten")


def _follow(api: Coordinator, node: cluster_pb2.Node) -> None:
    """Print what the drain waits for whenever that changes, until nothing is left."""
    shown, name = "", node.node_name
    try:
        while node.attempts and node.HasField("drain"):
            if (line := waits_for(node)) != shown:
                output.note(shown := line)
            time.sleep(POLL_S)
            node = next((each for each in api.patiently(api.nodes) if each.node_id == node.node_id), cluster_pb2.Node())
    except KeyboardInterrupt:
        output.note(f"detached; the drain goes on. pipectl get nodes {node.node_name} -o wide shows it")
        sys.exit(int(Exit.DETACHED))
    if not node.node_id:
        told = f"{output.safe(name)} was forgotten while it was drained: nobody knows whether anything still runs there"
        raise CommandError(told, Exit.CONFLICT)
    if not node.HasField("drain"):
        raise CommandError(f"the drain of {node.node_name} was called off", Exit.CONFLICT)
    else:
        output.note(f"{output.safe(node.node_name)} is drained")


def waits_for(node: cluster_pb2.Node) -> str:
    """Return what a drain waits for, in one line."""
    held = ", ".join(f"{each.name} ({each.job_id}, {each.state}, {each.slots} slots)" for each in node.attempts)
    left_s = max(0.0, node.drain.deadline.ToNanoseconds() / 1e9 - time.time())
    until = f"stopped in {output.duration(left_s)} unless they end before" if left_s else "past the deadline"
    lost = " The node is LOST: it must come back and report, or be forgotten." * (
        node.state == cluster_pb2.NODE_STATE_LOST
    )
    return output.safe(f"{node.node_name} waits for {held}; {until}.{lost}")


def _told(node: cluster_pb2.Node) -> None:
    output.note(f"{output.safe(node.node_name)}: {output.node_state_name(node)}, {output.node_flags(node)}")
