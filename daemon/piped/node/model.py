"""What the node's parts say to each other: desired state, observed attempts, facts, actions. Plain frozen data.

No protobuf type here: piped.node.convert makes these from messages and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """What the coordinator wants of an attempt on this node."""

    PREPARE = "prepare"  # directory, source, checks, shim
    RUN = "run"  # each rank started, at most once
    STOP = "stop"  # nothing runs


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker's share of this machine."""

    index: int
    device: str  # "cpu:0", "cuda:1"
    uuid: str = ""  # of a CUDA device


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where one rank runs."""

    rank: int
    replica: int
    stages: tuple[int, ...]
    node_id: str
    node_name: str
    slot: Slot


@dataclass(frozen=True, slots=True)
class Peer:
    """A node of an attempt, and where it answers calls (piped.node.edges); "": it is of a version that answers none."""

    node_id: str
    node_name: str
    data_address: str
    probe_address: str


@dataclass(frozen=True, slots=True)
class Edge:
    """The wire to another node, as it was measured."""

    peer_id: str
    rtt_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class DesiredAttempt:
    """One attempt as the coordinator wants it.

    `spec` is the job file as a dict with every field set, secrets left out; `env` holds them.
    """

    fence: int
    job_id: str
    attempt: int
    phase: Phase
    spec: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[RankPlacement, ...] = ()  # of the whole attempt, by rank
    store_endpoint: str = ""
    grace_s: float = 0.0
    stop_trigger: str = ""
    peers: tuple[Peer, ...] = ()  # every node of the attempt, while it is prepared
    dumps_stacks: bool = False

    def ranks_on(self, node_id: str) -> tuple[RankPlacement, ...]:
        """Return the ranks that belong to node `node_id`."""
        return tuple(placement for placement in self.ranks if placement.node_id == node_id)


@dataclass(frozen=True, slots=True)
class DesiredState:
    """All that the coordinator wants of this node."""

    desired_rev: int
    attempts: tuple[DesiredAttempt, ...] = ()
    epoch: int = 0  # of the coordinator that said so


class Shim(StrEnum):
    """What is known of an attempt's shim."""

    NEVER = "never"  # none was started
    STARTING = "starting"  # being prepared or connected to
    CONNECTED = "connected"
    GONE = "gone"  # it was there, and an attempt never gets a second one


@dataclass(frozen=True, slots=True)
class Observed:
    """One attempt as it is on this node."""

    fence: int
    job_id: str
    shim: Shim
    preparation_failed: bool = False
    started: frozenset[int] = frozenset()  # told to start, or found started
    exited: frozenset[int] = frozenset()
    exits_acknowledged: bool = True  # the coordinator has every exit of `exited`
    told_grace_s: float | None = None  # the grace of the newest stop that the shim was told


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that happened, named as in the Fact message; `body` holds that message's fields.

    `boottime_ns` is this host's CLOCK_BOOTTIME.
    """

    fence: int
    rank: int | None
    kind: str
    boottime_ns: int
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> FactKey:
        """Return what the coordinator acknowledges it by."""
        return self.fence, self.rank, self.kind


FactKey = tuple[int, int | None, str]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the attempt's directory, fetch its source, check, start its shim; report prepared or why not."""

    desired: DesiredAttempt


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give up a preparation that no shim came out of yet."""

    fence: int


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Tell the shim to start these ranks."""

    desired: DesiredAttempt
    ranks: tuple[RankPlacement, ...]


@dataclass(frozen=True, slots=True)
class PassEndpoint:
    """Tell these ranks where rank 0's store listens."""

    fence: int
    ranks: tuple[int, ...]
    endpoint: str


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Tell the shim to stop what runs and to start nothing any more."""

    fence: int
    grace_s: float
    trigger: str
    dumps_stacks: bool = False  # every rank first writes its stacks into its log


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell the shim to leave: nothing runs and every exit is with the coordinator."""

    fence: int


@dataclass(frozen=True, slots=True)
class Report:
    """Report a fact that follows from what is observed."""

    fence: int
    rank: int | None
    kind: str


Action = Prepare | Abandon | StartRanks | PassEndpoint | StopRanks | Dismiss | Report
