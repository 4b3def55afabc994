"""What happened, in the past tense: the only input of `machine.apply`.

Facts come from a node about one fence; a fact of an unknown or ended fence changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from piped.core.model import Failure, JobSpec, Moment, Slot, WorkerReport


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """A new process took over the store: no session is open."""

    accepts_rollback: bool = False  # an operator says that what a newer store knew is lost


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A client sent a checked spec. `job_id` is used unless the request is a repetition."""

    job_id: str
    request_id: str
    spec_hash: str
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class CancelRequested:
    job_id: str


@dataclass(frozen=True, slots=True)
class HoldRequested:
    job_id: str
    who: str
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    job_id: str
    who: str


@dataclass(frozen=True, slots=True)
class CordonRequested:
    node_id: str
    who: str
    why: str


@dataclass(frozen=True, slots=True)
class UncordonRequested:
    node_id: str
    who: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The node is to be emptied; what still runs there after `within_s` is stopped with grace."""

    node_id: str
    who: str
    why: str
    within_s: float


@dataclass(frozen=True, slots=True)
class ForgetRequested:
    """An admin says that a LOST node and everything on it is gone for good."""

    node_id: str
    who: str
    why: str


@dataclass(frozen=True, slots=True)
class DrainDeadlinePassed:
    """The deadline of the drain that was asked for at `at_s` has passed."""

    node_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class QuarantineEnded:
    """The time of the quarantine that began at `at_s` is over."""

    node_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class BackoffEnded:
    """The job has waited for its next attempt; the wait began at `at_s`."""

    job_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class ArtifactStored:
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ObservedAttempt:
    """An attempt of which a node still holds something."""

    fence: int
    is_shim_alive: bool
    started_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    """A node opened a session with a full account of itself."""

    cluster_id: str  # empty on its first registration
    node_id: str
    node_name: str
    host_key: str
    version: str
    highest_epoch: int
    highest_fence: int
    data_address: str
    metrics_address: str
    slots: tuple[Slot, ...]
    attempts: tuple[ObservedAttempt, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    session: int = 0  # numbers the sessions of this coordinator's life

    @property
    def boot(self) -> str:
        """Return what is equal for nodes of one machine: its boot."""
        return self.host_key.split(" ")[0]


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """That session of the node ended; a newer one may be registered already."""

    node_id: str
    session: int


@dataclass(frozen=True, slots=True)
class StoreRetried:
    """The store refused a transaction a while ago, as on a full disk; this one shows whether it takes them again."""


@dataclass(frozen=True, slots=True)
class WiresMeasured:
    """What the wires from a node to others carry, in bytes per second by node id."""

    node_id: str
    bytes_per_s: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    node_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class StartDeadlinePassed:
    fence: int


@dataclass(frozen=True, slots=True)
class HangFound:
    """The attempt stands still; `failure` says who keeps the others waiting."""

    fence: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class PlacementDue:
    """Jobs, slots or nodes changed since the last look at the queue."""


@dataclass(frozen=True, slots=True)
class AttemptPrepared:
    node_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class PrepareRefused:
    node_id: str
    fence: int
    message: str
    is_nodes: bool = False  # the node says that it is to blame, and not the job
    peer_id: str = ""  # the node says that it does not reach that one


@dataclass(frozen=True, slots=True)
class WorkerSpawned:
    node_id: str
    fence: int
    rank: int
    pid: int
    starttime: int


@dataclass(frozen=True, slots=True)
class StoreListened:
    """Rank 0's store listens."""

    node_id: str
    fence: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    node_id: str
    fence: int
    rank: int


@dataclass(frozen=True, slots=True)
class PlanReported:
    node_id: str
    fence: int
    plan: bytes


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    node_id: str
    fence: int
    rank: int
    report: WorkerReport
    boottime_ns: int
    moment: Moment | None = None


@dataclass(frozen=True, slots=True)
class WorkerDone:
    node_id: str
    fence: int
    rank: int
    step: int
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerExited:
    node_id: str
    fence: int
    rank: int
    code: int | None
    signal: int | None
    by_supervisor: bool
    log_tail: str
    boottime_ns: int
    moment: Moment | None = None
    oom_killed: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost:
    node_id: str
    fence: int
    rank: int
    boottime_ns: int = 0


@dataclass(frozen=True, slots=True)
class WorkerUnkillable:
    """SIGKILL was sent to it a while ago, and it has not ended."""

    node_id: str
    fence: int
    rank: int


@dataclass(frozen=True, slots=True)
class AttemptEmptied:
    """The node holds no process of the fence and will start none."""

    node_id: str
    fence: int


WorkerFact = WorkerSpawned | WorkerJoined | WorkerFailed | WorkerDone | WorkerExited | WorkerLost | WorkerUnkillable
Fact = AttemptPrepared | PrepareRefused | StoreListened | PlanReported | AttemptEmptied | WorkerFact
Event = (
    CoordinatorStarted
    | JobSubmitted
    | CancelRequested
    | HoldRequested
    | ReleaseRequested
    | CordonRequested
    | UncordonRequested
    | DrainRequested
    | DrainDeadlinePassed
    | ForgetRequested
    | QuarantineEnded
    | BackoffEnded
    | ArtifactStored
    | NodeRegistered
    | NodeDisconnected
    | WiresMeasured
    | LeaseExpired
    | StoreRetried
    | StartDeadlinePassed
    | HangFound
    | PlacementDue
    | Fact
)
