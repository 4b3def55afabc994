"""The coordinator's whole knowledge as frozen data: nodes, jobs, attempts, workers, reservations.

It decides nothing: the tables of legal transitions stand in `jobs`, `attempts` and `nodes`. Everything in `State`
but a node's session number is stored; what is only observed and short-lived (beats, progress, open streams) is not here.
Times are Unix seconds of the coordinator, for people; no decision compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from piped.core.schedules import csv_forwards


def _because(why: str) -> str:
    return f": {why}" if why else ""


class JobState(StrEnum):
    QUEUED = "queued"  # accepted; `pending_reason` says why it has no attempt
    HELD = "held"  # as QUEUED, but not placed until it is released
    BACKOFF = "backoff"  # waits a moment before it is queued for its next attempt
    STARTING = "starting"  # an attempt holds its slots; not every rank has joined
    RUNNING = "running"  # every rank joined
    PREEMPTING = "preempting"  # its nodes were told to stop; it goes back to the queue
    CANCELLING = "cancelling"  # its nodes were told to stop
    SUCCEEDED = "succeeded"  # every rank said done and exited 0
    FAILED = "failed"  # `failure` says why
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    RESERVED = "reserved"  # fence, placement and slots are written
    PREPARING = "preparing"  # nodes make the directory, fetch the source, start the shim
    PREPARED = "prepared"  # every node is ready to start its ranks
    COMMITTED = "committed"  # shims may start workers
    RUNNING = "running"  # every rank joined
    STOPPING = "stopping"  # `stop_trigger` is written; ends when its nodes hold nothing of it
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ABORTED = "aborted"  # it never started: not the job's fault
    PREEMPTED = "preempted"  # it had to make room: not the job's fault


class NodeState(StrEnum):
    READY = "ready"  # its session is open
    DISCONNECTED = "disconnected"  # no session, its lease still runs
    LOST = "lost"  # the lease ran out; its slots stay reserved until it reports them empty
    FENCED = "fenced"  # an admin said that it is gone: its slots are free; it must register anew


class WorkerState(StrEnum):
    PLANNED = "planned"
    SPAWNED = "spawned"
    JOINED = "joined"
    UNKILLABLE = "unkillable"  # SIGKILL was sent and it has not ended; it may yet
    EXITED = "exited"
    LOST = "lost"  # it was started, and neither a shim nor an exit record remains


class FailureReason(StrEnum):
    USER_ERROR = "user_error"
    SIGNALLED = "signalled"
    NODE_LOST = "node_lost"
    START_TIMEOUT = "start_timeout"
    NUMERIC = "numeric"
    HANG = "hang"
    OOM_KILLED = "oom_killed"
    INFRA = "infra"


SlotKey = tuple[str, int]  # node_id, slot index
Wire = tuple[str, str]  # two node_ids, the lesser first
TenantKey = tuple[str, str]  # tenant, and a name or id of its own

TERMINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
TERMINAL_ATTEMPT_STATES = frozenset(
    {
        AttemptState.SUCCEEDED,
        AttemptState.FAILED,
        AttemptState.CANCELLED,
        AttemptState.ABORTED,
        AttemptState.PREEMPTED,
    }
)


@dataclass(frozen=True, slots=True)
class Slot:
    """What one worker takes: a CUDA device or a CPU share."""

    index: int
    device: str  # "cpu:0", "cuda:1"
    uuid: str = ""  # of a CUDA device

    @property
    def kind(self) -> str:
        """Return "cpu" or "cuda"."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator's word that a node gets no new work."""

    who: str
    why: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator's word that a node is to be emptied: no new work, and what still runs after `within_s` is stopped."""

    who: str
    why: str
    at_s: float
    within_s: float

    def left_s(self, now_s: float) -> float:
        """Return the seconds to the deadline; a clock that was set can't make it longer than `within_s`."""
        return min(self.within_s, max(0.0, self.at_s + self.within_s - now_s))


@dataclass(frozen=True, slots=True)
class Quarantine:
    """No new work for `for_s`, since the node could not prepare what it was given."""

    why: str
    at_s: float
    for_s: float

    def left_s(self, now_s: float) -> float:
        """Return the seconds to its end; a clock that was set can't make it longer than `for_s`."""
        return min(self.for_s, max(0.0, self.at_s + self.for_s - now_s))


@dataclass(frozen=True, slots=True)
class Backoff:
    """A job's wait of `for_s` before its next attempt."""

    at_s: float
    for_s: float

    def left_s(self, now_s: float) -> float:
        """Return the seconds to its end; a clock that was set can't make it longer than `for_s`."""
        return min(self.for_s, max(0.0, self.at_s + self.for_s - now_s))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node could not prepare the job. `is_nodes`: by its own fault; else it may be the job's."""

    node_id: str
    node_name: str
    why: str
    is_nodes: bool
    by: str = ""  # the node that could not reach it, where that is all that is known


@dataclass(frozen=True, slots=True)
class Node:
    """A registered machine; `incarnation` counts its registrations after a lost lease."""

    node_id: str
    node_name: str
    host_key: str
    incarnation: int
    state: NodeState
    version: str
    data_address: str
    metrics_address: str
    slots: tuple[Slot, ...]
    session: int = 0  # that registered it; not stored, since no session outlives its coordinator
    cordon: Cordon | None = None
    drain: Drain | None = None
    labels: tuple[tuple[str, str], ...] = ()
    strikes: tuple[str, ...] = ()  # jobs that it could not prepare since it last could prepare one
    quarantine: Quarantine | None = None

    @property
    def boot(self) -> str:
        """Return what is equal for nodes of one machine: its boot."""
        return self.host_key.split(" ")[0]

    @property
    def is_gone(self) -> bool:
        """Return whether nothing is expected of it: its lease ran out."""
        return self.state in (NodeState.LOST, NodeState.FENCED)

    @property
    def closed_because(self) -> str:
        """Return why it takes no new work; empty: it does."""
        if self.drain is not None:
            return f"being drained by {self.drain.who}{_because(self.drain.why)}"
        if self.cordon is not None:
            return f"cordoned by {self.cordon.who}{_because(self.cordon.why)}"
        return f"in quarantine: {self.quarantine.why}" if self.quarantine is not None else ""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What decisions need of a job file; `payload` is the whole of it, opaque here."""

    name: str
    program: str
    stages: int
    stages_per_rank: int
    replicas: int
    schedule: str
    chunks: int
    steps: int
    log_every: int
    device: str  # auto | cpu | cuda
    slots_per_node: int  # 0: as many as the node has
    grace_s: int
    env: tuple[tuple[str, str], ...]
    source_sha256: str
    payload: bytes
    start_timeout_s: int = 600  # the default is for jobs that were stored before there was a choice
    json_bytes: int = 0  # of the whole job file
    stages_of_ranks: tuple[int, ...] = ()  # where ranks hold unequal numbers of stages, each the next so many
    schedule_csv: str = ""  # the text of a schedule that is a file
    placement: str = "spread"  # spread | pack
    priority: int = 0  # higher ones go first, and may take the slots of lower ones
    node_selector: tuple[tuple[str, str], ...] = ()  # labels that its nodes must have
    tenant: str = "default"  # whose quota it counts for
    restarts: int = 0  # attempts after failures that are the job's own
    hang_timeout_s: int = 0  # without progress of a rank; 0: as its steps are measured

    @property
    def pp_ranks(self) -> int:
        """Return the number of ranks of one replica."""
        if self.schedule_csv:
            return csv_forwards(self.schedule_csv)[1]
        return len(self.stages_of_ranks) or self.stages // self.stages_per_rank

    @property
    def key(self) -> TenantKey:
        """Return what no other live job may share."""
        return self.tenant, self.name

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp_ranks * self.replicas


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed and which rank failed first; rank -1: none is to blame.

    `message` says what happened to that rank and leaves its name to `rank`, `node_name` and `stages`.
    """

    reason: FailureReason
    message: str
    rank: int = -1
    node_name: str = ""
    stages: tuple[int, ...] = ()
    step: int = -1
    traceback: str = ""
    log_tail: str = ""

    @property
    def sentence(self) -> str:
        """Return the message with the rank and node that it speaks of."""
        return f"rank {self.rank} on {self.node_name}: {self.message}" if self.rank >= 0 else self.message


@dataclass(frozen=True, slots=True)
class Job:
    """One submitted job. `attempt` and `fence` are those of its newest attempt, 0 before the first."""

    job_id: str
    state: JobState
    spec: JobSpec
    submit_seq: int  # its place in the queue
    submitted_s: float
    pending_reason: str = ""
    attempt: int = 0
    fence: int = 0
    aborts: int = 0  # attempts that never started since the job last ran
    refusals: tuple[Refusal, ...] = ()  # of nodes since the job last ran, the newest of each
    restarts: int = 0  # that were charged to it
    backoff: Backoff | None = None  # in BACKOFF
    started_s: float | None = None
    finished_s: float | None = None
    failure: Failure | None = None
    event_seq: int = 0  # of its newest event
    earmark: tuple[SlotKey, ...] = ()  # slots kept for it while it is the head of the queue

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_JOB_STATES


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where one rank runs and which stages it owns."""

    rank: int
    replica: int
    stages: tuple[int, ...]
    node_id: str
    node_name: str
    slot: Slot


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's own account of its failure."""

    message: str
    traceback: str = ""
    step: int = -1
    is_transport: bool = False  # a neighbour's death seen through the transport: a victim
    is_numeric: bool = False
    peer_rank: int = -1
    peer_message: str = ""  # a victim's quote of what that rank told of its own failure; empty: it told nothing
    peer_traceback: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """When something happened on a node, on the coordinator's boot clock: not before, and not after."""

    earliest_ns: int
    latest_ns: int


@dataclass(frozen=True, slots=True)
class Worker:
    """What is known of one rank. Boot times are of its own host: comparable on that host only."""

    rank: int
    state: WorkerState = WorkerState.PLANNED
    pid: int = 0
    starttime: int = 0
    has_joined: bool = False  # also after it ended
    is_done: bool = False
    done_step: int = 0  # steps finished when it said done
    done_loss: float = 0.0  # of that step
    report: WorkerReport | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    by_supervisor: bool = False
    failed_boottime_ns: int = 0  # of the report, else of the exit
    failed_moment: Moment | None = None  # the same, where the offset of its node's clock was known
    oom_killed: bool = False  # as its cgroup counted
    log_tail: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in (WorkerState.EXITED, WorkerState.LOST)

    @property
    def has_succeeded(self) -> bool:
        return self.is_done and self.state is WorkerState.EXITED and self.exit_code == 0 and self.report is None

    @property
    def has_failed(self) -> bool:
        """Return whether it failed in a way that ends the attempt."""
        return self.report is not None or (self.has_ended and not self.has_succeeded)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a job. The placement never changes; `fence` orders all attempts of the cluster."""

    fence: int
    job_id: str
    attempt: int
    state: AttemptState
    placement: tuple[RankPlacement, ...]  # by rank
    workers: tuple[Worker, ...]  # by rank
    created_s: float
    prepared_nodes: frozenset[str] = frozenset()
    store_endpoint: str = ""
    plan: bytes = b""  # the plan summary of rank 0, opaque here
    stop_trigger: str = ""  # written once
    outcome: AttemptState | None = None  # what STOPPING ends in
    grace_s: float = 0.0
    verdict: Failure | None = None

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_ATTEMPT_STATES

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Return its nodes in the order of their first rank."""
        return tuple(dict.fromkeys(each.node_id for each in self.placement))

    def is_on(self, rank: int, node_id: str) -> bool:
        """Return whether there is such a rank, on that node."""
        return 0 <= rank < len(self.placement) and self.placement[rank].node_id == node_id


@dataclass(frozen=True, slots=True)
class Submission:
    """An accepted request: the same id of the same tenant with the same spec gives the same job."""

    tenant: str
    request_id: str
    spec_hash: str
    job_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file in the artifact store."""

    sha256: str
    size_bytes: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the event log."""

    event_seq: int
    at_s: float
    name: str
    reason: str
    job_id: str = ""
    node_name: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Live numbers of one rank; never stored."""

    step: int  # steps finished
    steps: int  # of so many
    loss: float
    tokens_per_s: float
    step_s: float


def wire_between(one: str, other: str) -> Wire:
    """Return the key of the wire between two nodes."""
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True, slots=True)
class State:
    """Everything. `event_seq` grows with every change, so it also numbers desired states."""

    cluster_id: str
    epoch: int
    event_seq: int = 0
    last_fence: int = 0
    nodes: Mapping[str, Node] = field(default_factory=dict)  # by node_id
    jobs: Mapping[str, Job] = field(default_factory=dict)  # by job_id, oldest first
    live_names: Mapping[TenantKey, str] = field(
        default_factory=dict
    )  # (tenant, name): job_id; of jobs that have not ended
    attempts: Mapping[int, Attempt] = field(default_factory=dict)  # by fence
    reservations: Mapping[SlotKey, int] = field(default_factory=dict)  # fence that holds the slot
    submissions: Mapping[TenantKey, Submission] = field(default_factory=dict)  # by (tenant, request_id)
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)  # by sha256
    quotas: Mapping[str, int] = field(default_factory=dict)  # slots by tenant; configured, not stored
    wires: Mapping[Wire, float] = field(default_factory=dict)  # bytes per second; nodes measure it anew, not stored
