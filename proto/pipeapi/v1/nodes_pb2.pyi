from pipeapi.v1 import cluster_pb2 as _cluster_pb2
from pipeapi.v1 import jobs_pb2 as _jobs_pb2
from pipeapi.v1 import spec_pb2 as _spec_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREPARE: _ClassVar[Phase]
    PHASE_RUN: _ClassVar[Phase]
    PHASE_STOP: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_PREPARE: Phase
PHASE_RUN: Phase
PHASE_STOP: Phase

class SessionRequest(_message.Message):
    __slots__ = ("hello", "beat", "facts")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    beat: Beat
    facts: FactReport
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., facts: _Optional[_Union[FactReport, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "beat_ack", "desired", "fact_ack")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    FACT_ACK_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    beat_ack: BeatAck
    desired: DesiredState
    fact_ack: FactAck
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., beat_ack: _Optional[_Union[BeatAck, _Mapping]] = ..., desired: _Optional[_Union[DesiredState, _Mapping]] = ..., fact_ack: _Optional[_Union[FactAck, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("cluster_id", "node_id", "node_name", "host_key", "version", "highest_epoch", "highest_fence", "data_address", "metrics_address", "slots", "labels", "probe_address", "attempts")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FENCE_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PROBE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    node_id: str
    node_name: str
    host_key: str
    version: str
    highest_epoch: int
    highest_fence: int
    data_address: str
    metrics_address: str
    slots: _containers.RepeatedCompositeFieldContainer[_cluster_pb2.Slot]
    labels: _containers.ScalarMap[str, str]
    probe_address: str
    attempts: _containers.RepeatedCompositeFieldContainer[ObservedAttempt]
    def __init__(self, cluster_id: _Optional[str] = ..., node_id: _Optional[str] = ..., node_name: _Optional[str] = ..., host_key: _Optional[str] = ..., version: _Optional[str] = ..., highest_epoch: _Optional[int] = ..., highest_fence: _Optional[int] = ..., data_address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., slots: _Optional[_Iterable[_Union[_cluster_pb2.Slot, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., probe_address: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[ObservedAttempt, _Mapping]]] = ...) -> None: ...

class ObservedAttempt(_message.Message):
    __slots__ = ("fence", "job_id", "shim_alive", "started_ranks")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SHIM_ALIVE_FIELD_NUMBER: _ClassVar[int]
    STARTED_RANKS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    job_id: str
    shim_alive: bool
    started_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fence: _Optional[int] = ..., job_id: _Optional[str] = ..., shim_alive: _Optional[bool] = ..., started_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("cluster_id", "coordinator_epoch", "incarnation", "beat_s", "lease_ttl_s")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    coordinator_epoch: int
    incarnation: int
    beat_s: float
    lease_ttl_s: float
    def __init__(self, cluster_id: _Optional[str] = ..., coordinator_epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., beat_s: _Optional[float] = ..., lease_ttl_s: _Optional[float] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("beat_seq", "sent_boottime_ns", "loop_lag_s", "desired_rev", "progress", "clock_offset_s", "clock_error_s", "edges")
    BEAT_SEQ_FIELD_NUMBER: _ClassVar[int]
    SENT_BOOTTIME_NS_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_S_FIELD_NUMBER: _ClassVar[int]
    DESIRED_REV_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    beat_seq: int
    sent_boottime_ns: int
    loop_lag_s: float
    desired_rev: int
    progress: _containers.RepeatedCompositeFieldContainer[RankProgress]
    clock_offset_s: float
    clock_error_s: float
    edges: _containers.RepeatedCompositeFieldContainer[Edge]
    def __init__(self, beat_seq: _Optional[int] = ..., sent_boottime_ns: _Optional[int] = ..., loop_lag_s: _Optional[float] = ..., desired_rev: _Optional[int] = ..., progress: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ..., clock_offset_s: _Optional[float] = ..., clock_error_s: _Optional[float] = ..., edges: _Optional[_Iterable[_Union[Edge, _Mapping]]] = ...) -> None: ...

class RankProgress(_message.Message):
    __slots__ = ("fence", "rank", "progress", "position")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    fence: int
    rank: int
    progress: _jobs_pb2.Progress
    position: Position
    def __init__(self, fence: _Optional[int] = ..., rank: _Optional[int] = ..., progress: _Optional[_Union[_jobs_pb2.Progress, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("step", "section", "action", "waiting_on", "waiting_on_all", "age_s", "silent_s", "longest_step_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WAITING_ON_FIELD_NUMBER: _ClassVar[int]
    WAITING_ON_ALL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    section: str
    action: str
    waiting_on: _containers.RepeatedScalarFieldContainer[int]
    waiting_on_all: bool
    age_s: float
    silent_s: float
    longest_step_s: float
    def __init__(self, step: _Optional[int] = ..., section: _Optional[str] = ..., action: _Optional[str] = ..., waiting_on: _Optional[_Iterable[int]] = ..., waiting_on_all: _Optional[bool] = ..., age_s: _Optional[float] = ..., silent_s: _Optional[float] = ..., longest_step_s: _Optional[float] = ...) -> None: ...

class BeatAck(_message.Message):
    __slots__ = ("beat_seq", "beat_s", "lease_ttl_s", "unix_ns", "boottime_ns")
    BEAT_SEQ_FIELD_NUMBER: _ClassVar[int]
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    BOOTTIME_NS_FIELD_NUMBER: _ClassVar[int]
    beat_seq: int
    beat_s: float
    lease_ttl_s: float
    unix_ns: int
    boottime_ns: int
    def __init__(self, beat_seq: _Optional[int] = ..., beat_s: _Optional[float] = ..., lease_ttl_s: _Optional[float] = ..., unix_ns: _Optional[int] = ..., boottime_ns: _Optional[int] = ...) -> None: ...

class DesiredState(_message.Message):
    __slots__ = ("desired_rev", "attempts")
    DESIRED_REV_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    desired_rev: int
    attempts: _containers.RepeatedCompositeFieldContainer[DesiredAttempt]
    def __init__(self, desired_rev: _Optional[int] = ..., attempts: _Optional[_Iterable[_Union[DesiredAttempt, _Mapping]]] = ...) -> None: ...

class DesiredAttempt(_message.Message):
    __slots__ = ("job_id", "attempt", "fence", "phase", "spec", "ranks", "store_endpoint", "grace_s", "stop_trigger", "dump_stacks", "peers")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STORE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    STOP_TRIGGER_FIELD_NUMBER: _ClassVar[int]
    DUMP_STACKS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    attempt: int
    fence: int
    phase: Phase
    spec: _spec_pb2.JobSpec
    ranks: _containers.RepeatedCompositeFieldContainer[RankPlacement]
    store_endpoint: str
    grace_s: float
    stop_trigger: str
    dump_stacks: bool
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, job_id: _Optional[str] = ..., attempt: _Optional[int] = ..., fence: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., spec: _Optional[_Union[_spec_pb2.JobSpec, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankPlacement, _Mapping]]] = ..., store_endpoint: _Optional[str] = ..., grace_s: _Optional[float] = ..., stop_trigger: _Optional[str] = ..., dump_stacks: _Optional[bool] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class RankPlacement(_message.Message):
    __slots__ = ("rank", "replica", "stages", "node_id", "node_name", "slot")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    replica: int
    stages: _containers.RepeatedScalarFieldContainer[int]
    node_id: str
    node_name: str
    slot: _cluster_pb2.Slot
    def __init__(self, rank: _Optional[int] = ..., replica: _Optional[int] = ..., stages: _Optional[_Iterable[int]] = ..., node_id: _Optional[str] = ..., node_name: _Optional[str] = ..., slot: _Optional[_Union[_cluster_pb2.Slot, _Mapping]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("node_id", "node_name", "data_address", "probe_address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROBE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    node_name: str
    data_address: str
    probe_address: str
    def __init__(self, node_id: _Optional[str] = ..., node_name: _Optional[str] = ..., data_address: _Optional[str] = ..., probe_address: _Optional[str] = ...) -> None: ...

class Edge(_message.Message):
    __slots__ = ("peer_node_id", "rtt_s", "bytes_per_s")
    PEER_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer_node_id: str
    rtt_s: float
    bytes_per_s: float
    def __init__(self, peer_node_id: _Optional[str] = ..., rtt_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class FactReport(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class SerializedSessionResponse(_message.Message):
    __slots__ = ("desired",)
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    desired: bytes
    def __init__(self, desired: _Optional[bytes] = ...) -> None: ...

class SerializedDesiredState(_message.Message):
    __slots__ = ("desired_rev", "attempts")
    DESIRED_REV_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    desired_rev: int
    attempts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, desired_rev: _Optional[int] = ..., attempts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("fence", "rank", "boottime_ns", "moment", "prepared", "prepare_failed", "spawned", "store_listening", "joined", "planned", "worker_failed", "worker_done", "exited", "attempt_empty", "rank_lost", "unkillable")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BOOTTIME_NS_FIELD_NUMBER: _ClassVar[int]
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FAILED_FIELD_NUMBER: _ClassVar[int]
    SPAWNED_FIELD_NUMBER: _ClassVar[int]
    STORE_LISTENING_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    WORKER_FAILED_FIELD_NUMBER: _ClassVar[int]
    WORKER_DONE_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_EMPTY_FIELD_NUMBER: _ClassVar[int]
    RANK_LOST_FIELD_NUMBER: _ClassVar[int]
    UNKILLABLE_FIELD_NUMBER: _ClassVar[int]
    fence: int
    rank: int
    boottime_ns: int
    moment: Moment
    prepared: Prepared
    prepare_failed: PrepareFailed
    spawned: Spawned
    store_listening: StoreListening
    joined: Joined
    planned: Planned
    worker_failed: WorkerFailed
    worker_done: WorkerDone
    exited: Exited
    attempt_empty: AttemptEmpty
    rank_lost: RankLost
    unkillable: Unkillable
    def __init__(self, fence: _Optional[int] = ..., rank: _Optional[int] = ..., boottime_ns: _Optional[int] = ..., moment: _Optional[_Union[Moment, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., prepare_failed: _Optional[_Union[PrepareFailed, _Mapping]] = ..., spawned: _Optional[_Union[Spawned, _Mapping]] = ..., store_listening: _Optional[_Union[StoreListening, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., planned: _Optional[_Union[Planned, _Mapping]] = ..., worker_failed: _Optional[_Union[WorkerFailed, _Mapping]] = ..., worker_done: _Optional[_Union[WorkerDone, _Mapping]] = ..., exited: _Optional[_Union[Exited, _Mapping]] = ..., attempt_empty: _Optional[_Union[AttemptEmpty, _Mapping]] = ..., rank_lost: _Optional[_Union[RankLost, _Mapping]] = ..., unkillable: _Optional[_Union[Unkillable, _Mapping]] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("earliest_ns", "latest_ns")
    EARLIEST_NS_FIELD_NUMBER: _ClassVar[int]
    LATEST_NS_FIELD_NUMBER: _ClassVar[int]
    earliest_ns: int
    latest_ns: int
    def __init__(self, earliest_ns: _Optional[int] = ..., latest_ns: _Optional[int] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareFailed(_message.Message):
    __slots__ = ("message", "node_fault", "peer_node_id")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NODE_FAULT_FIELD_NUMBER: _ClassVar[int]
    PEER_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    message: str
    node_fault: bool
    peer_node_id: str
    def __init__(self, message: _Optional[str] = ..., node_fault: _Optional[bool] = ..., peer_node_id: _Optional[str] = ...) -> None: ...

class Spawned(_message.Message):
    __slots__ = ("pid", "starttime")
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTTIME_FIELD_NUMBER: _ClassVar[int]
    pid: int
    starttime: int
    def __init__(self, pid: _Optional[int] = ..., starttime: _Optional[int] = ...) -> None: ...

class StoreListening(_message.Message):
    __slots__ = ("endpoint",)
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    def __init__(self, endpoint: _Optional[str] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Planned(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: _jobs_pb2.PlanSummary
    def __init__(self, plan: _Optional[_Union[_jobs_pb2.PlanSummary, _Mapping]] = ...) -> None: ...

class WorkerFailed(_message.Message):
    __slots__ = ("is_transport", "peer_rank", "message", "traceback", "step", "is_numeric", "peer_message", "peer_traceback")
    IS_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PEER_RANK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IS_NUMERIC_FIELD_NUMBER: _ClassVar[int]
    PEER_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    is_transport: bool
    peer_rank: int
    message: str
    traceback: str
    step: int
    is_numeric: bool
    peer_message: str
    peer_traceback: str
    def __init__(self, is_transport: _Optional[bool] = ..., peer_rank: _Optional[int] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., step: _Optional[int] = ..., is_numeric: _Optional[bool] = ..., peer_message: _Optional[str] = ..., peer_traceback: _Optional[str] = ...) -> None: ...

class WorkerDone(_message.Message):
    __slots__ = ("step", "loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class Exited(_message.Message):
    __slots__ = ("code", "signal", "by_supervisor", "log_tail", "oom_killed")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    BY_SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    OOM_KILLED_FIELD_NUMBER: _ClassVar[int]
    code: int
    signal: int
    by_supervisor: bool
    log_tail: str
    oom_killed: bool
    def __init__(self, code: _Optional[int] = ..., signal: _Optional[int] = ..., by_supervisor: _Optional[bool] = ..., log_tail: _Optional[str] = ..., oom_killed: _Optional[bool] = ...) -> None: ...

class AttemptEmpty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankLost(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Unkillable(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FactAck(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[FactKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[FactKey, _Mapping]]] = ...) -> None: ...

class FactKey(_message.Message):
    __slots__ = ("fence", "rank", "kind")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    fence: int
    rank: int
    kind: int
    def __init__(self, fence: _Optional[int] = ..., rank: _Optional[int] = ..., kind: _Optional[int] = ...) -> None: ...

class BulkRequest(_message.Message):
    __slots__ = ("hello", "chunk")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    hello: BulkHello
    chunk: BulkChunk
    def __init__(self, hello: _Optional[_Union[BulkHello, _Mapping]] = ..., chunk: _Optional[_Union[BulkChunk, _Mapping]] = ...) -> None: ...

class BulkHello(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class BulkChunk(_message.Message):
    __slots__ = ("request_id", "data", "next_offset", "eof", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EOF_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    data: bytes
    next_offset: int
    eof: bool
    error: str
    def __init__(self, request_id: _Optional[int] = ..., data: _Optional[bytes] = ..., next_offset: _Optional[int] = ..., eof: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class BulkResponse(_message.Message):
    __slots__ = ("request_id", "fence", "rank", "kind", "offset", "tail_bytes", "max_bytes", "wait_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    fence: int
    rank: int
    kind: _jobs_pb2.RecordKind
    offset: int
    tail_bytes: int
    max_bytes: int
    wait_s: float
    def __init__(self, request_id: _Optional[int] = ..., fence: _Optional[int] = ..., rank: _Optional[int] = ..., kind: _Optional[_Union[_jobs_pb2.RecordKind, str]] = ..., offset: _Optional[int] = ..., tail_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...
