"""What must be true of this node and its wires before an attempt is prepared; each refusal in words.

Which nodes are called is decided here (`neighbours`, pure): those that the ranks of this node exchange tensors with, and rank 0's, where
the store is. Nothing blocks the loop. Called by piped.node.prepare; the wires are measured by piped.node.edges.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from piped.config import ConfigError, is_loopback
from piped.node import devices
from piped.node.edges import EdgeError, call
from piped.node.model import DesiredAttempt, Edge, Peer, RankPlacement
from piped.node.orders import Place

_FRESH_S = 60.0  # an edge that was measured so recently only has to answer
_MAX_CALLS = 8  # at once
_STORE = "the store of rank 0"


class PreflightError(Exception):
    """This node can't run the attempt; the text says why and what to do.

    `is_nodes`: this node is to blame, whatever the job; `peer_id`: the wire to that node is.
    """

    def __init__(self, text: str, *, is_nodes: bool = False, peer_id: str = "") -> None:
        super().__init__(text)
        self.is_nodes, self.peer_id = is_nodes, peer_id


@dataclass(frozen=True, slots=True)
class Call:
    """A node that must be reached, and what for."""

    peer: Peer
    purpose: str  # "stage 1 of rank 2"
    has_traffic: bool = True  # worth measuring


class Wires:
    """The edges of this node as they were last measured."""

    def __init__(self) -> None:
        self._edges: dict[str, tuple[float, Edge]] = {}
        self.revision = 0  # rises with every measurement

    def note(self, edge: Edge | None) -> None:
        """Take a measurement, if there was one."""
        if edge is not None:
            self._edges[edge.peer_id] = time.monotonic(), edge
            self.revision += 1

    def is_fresh(self, peer_id: str) -> bool:
        """Say whether the edge was measured a moment ago."""
        return peer_id in self._edges and time.monotonic() - self._edges[peer_id][0] < _FRESH_S

    def all(self) -> list[Edge]:
        """Return every edge that was ever measured."""
        return [edge for _, edge in self._edges.values()]


def neighbours(desired: DesiredAttempt, node_id: str) -> list[Call]:
    """Return the other nodes that this node's ranks send to or hear from, each once, with the first reason."""
    replicas = 1 + max((each.replica for each in desired.ranks), default=0)
    wanted: dict[str, str] = {}
    for rank in desired.ranks_on(node_id):
        for other in (each for each in desired.ranks if _exchange(rank, each, replicas)):
            wanted.setdefault(other.node_id, f"stage {_list(other.stages)} of rank {other.rank}")
    if desired.ranks:
        wanted.setdefault(desired.ranks[0].node_id, _STORE)
    wanted.pop(node_id, None)
    calls = ((peer, wanted[peer.node_id]) for peer in desired.peers if peer.node_id in wanted)
    return [Call(peer, purpose, purpose != _STORE) for peer, purpose in calls]


def _exchange(one: RankPlacement, other: RankPlacement, replicas: int) -> bool:
    """Say whether two ranks hold consecutive stages of one replica, or the same stages of replicas next to each other."""
    if one.replica == other.replica:
        return any(abs(a - b) == 1 for a in one.stages for b in other.stages)
    return one.stages == other.stages and (one.replica - other.replica) % replicas in (1, replicas - 1)


async def check(desired: DesiredAttempt, directory: Path, place: Place, wires: Wires, *, min_free_bytes: int) -> None:
    """Check this node for the attempt. Raises PreflightError."""
    await asyncio.to_thread(_check_here, desired, directory, place, min_free_bytes)
    calls = neighbours(desired, place.node_id)
    gate, failed = asyncio.Semaphore(_MAX_CALLS), dict[str, str]()

    async def try_one(each: Call) -> None:
        measures = each.has_traffic and not wires.is_fresh(each.peer.node_id)
        try:
            async with gate:
                edge = await call(each.peer, place.data_address, measures=measures)
        except EdgeError as error:
            failed[each.peer.node_id] = f"{each.peer.node_name} ({each.purpose}) is not reached: {error}"
        else:
            wires.note(edge)

    await asyncio.gather(*(try_one(each) for each in calls if each.peer.probe_address))
    if failed:
        raise _unreached(failed, len(calls), place)


def _unreached(failed: Mapping[str, str], num_calls: int, place: Place) -> PreflightError:
    """Blame the peer, or this node where it reaches none of several."""
    is_nodes = len(failed) == num_calls > 1
    text = "; ".join(list(failed.values())[:3]) + (f"; and {len(failed) - 3} more" if len(failed) > 3 else "")
    return PreflightError(
        f"{text}; from {place.data_address} on {place.interface}: look at data_address of both nodes, at routes and firewalls "
        "(workers take any port) between them",
        is_nodes=is_nodes,
        peer_id="" if is_nodes else next(iter(failed)),
    )


def _check_here(desired: DesiredAttempt, directory: Path, place: Place, min_free_bytes: int) -> None:
    _check_disk(directory, min_free_bytes)
    _check_slots(desired.ranks_on(place.node_id))
    _check_interface(place)
    python = desired.spec.get("python")
    if python and not os.access(str(python), os.X_OK):
        raise PreflightError(f"python: {python!r} is no executable file on this node; install it there or leave it out")
    used = {rank.node_id for rank in desired.ranks}
    for peer in desired.peers:
        if peer.node_id in used - {place.node_id}:
            _check_route(peer, place)


def _check_disk(directory: Path, min_free_bytes: int) -> None:
    try:
        free = shutil.disk_usage(directory).free
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise PreflightError(
            f"the node's state directory can't be written: {error.strerror} ({directory}); look at its disk, mount and owner",
            is_nodes=True,
        ) from error
    if free < min_free_bytes:
        raise PreflightError(
            f"{free >> 20} MiB are free in the node's state directory ({directory}); {min_free_bytes >> 20} MiB are needed for "
            "logs and source (min_free_mib); free some space there",
            is_nodes=True,
        )


def _check_slots(ranks: Iterable[RankPlacement]) -> None:
    wanted = {rank.slot.uuid: rank for rank in ranks if rank.slot.uuid}
    present = set(devices.cuda_uuids()) if wanted else set[str]()
    missing = [rank for uuid, rank in wanted.items() if uuid not in present]
    if missing:
        rank = missing[0]
        raise PreflightError(
            f"{rank.slot.device} ({rank.slot.uuid}) for stage {_list(rank.stages)} of rank {rank.rank} is not there any more; look at "
            "nvidia-smi and the kernel's log, and restart the node's daemon",
            is_nodes=True,
        )


def _check_interface(place: Place) -> None:
    try:
        interface = devices.interface_of(place.data_address)
    except ConfigError as error:
        raise PreflightError(f"{error}; then restart the node's daemon", is_nodes=True) from error
    if interface != place.interface:
        raise PreflightError(
            f"data_address {place.data_address} was on the interface {place.interface} when the node's daemon started and is on "
            f"{interface} now; restart the daemon",
            is_nodes=True,
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(place.data_address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as error:
        raise PreflightError(
            f"data_address {place.data_address!r}: workers can't listen there: {error.strerror}; set it to an address of this "
            "machine that the other nodes reach",
            is_nodes=True,
        ) from error


def _check_route(peer: Peer, place: Place) -> None:
    """Ask the kernel alone which address it would call the peer from; no packet is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer.data_address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            source = str(probe.getsockname()[0])
    except OSError as error:
        raise PreflightError(
            f"there is no route to {peer.node_name}'s data address {peer.data_address}: {error.strerror or error}; look at routes and "
            f"name service of this node, or at data_address of {peer.node_name}",
            peer_id=peer.node_id,
        ) from error
    if is_loopback(source) and not is_loopback(place.data_address):
        raise PreflightError(
            f"{peer.node_name}'s data address {peer.data_address} is this machine itself (from here it is called from {source}): give "
            f"{peer.node_name} a data_address that other hosts reach",
            peer_id=peer.node_id,
        )


def _list(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))
