import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from pipeapi.v1 import spec_pb2 as _spec_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_STARTING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_CANCELLING: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
    JOB_STATE_HELD: _ClassVar[JobState]
    JOB_STATE_BACKOFF: _ClassVar[JobState]
    JOB_STATE_PREEMPTING: _ClassVar[JobState]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_PLANNED: _ClassVar[WorkerState]
    WORKER_STATE_SPAWNED: _ClassVar[WorkerState]
    WORKER_STATE_JOINED: _ClassVar[WorkerState]
    WORKER_STATE_EXITED: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]
    WORKER_STATE_UNKILLABLE: _ClassVar[WorkerState]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_USER_ERROR: _ClassVar[FailureReason]
    FAILURE_REASON_SIGNALLED: _ClassVar[FailureReason]
    FAILURE_REASON_NODE_LOST: _ClassVar[FailureReason]
    FAILURE_REASON_START_TIMEOUT: _ClassVar[FailureReason]
    FAILURE_REASON_NUMERIC: _ClassVar[FailureReason]
    FAILURE_REASON_INFRA: _ClassVar[FailureReason]
    FAILURE_REASON_HANG: _ClassVar[FailureReason]
    FAILURE_REASON_OOM_KILLED: _ClassVar[FailureReason]

class RankRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_ROLE_UNSPECIFIED: _ClassVar[RankRole]
    RANK_ROLE_ROOT: _ClassVar[RankRole]
    RANK_ROLE_FAILED: _ClassVar[RankRole]
    RANK_ROLE_VICTIM: _ClassVar[RankRole]
    RANK_ROLE_LOST: _ClassVar[RankRole]
    RANK_ROLE_STOPPED: _ClassVar[RankRole]
    RANK_ROLE_SUCCEEDED: _ClassVar[RankRole]
    RANK_ROLE_UNFINISHED: _ClassVar[RankRole]

class RecordKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORD_KIND_UNSPECIFIED: _ClassVar[RecordKind]
    RECORD_KIND_LOG: _ClassVar[RecordKind]
    RECORD_KIND_TRACE: _ClassVar[RecordKind]
    RECORD_KIND_STEPS: _ClassVar[RecordKind]
    RECORD_KIND_PLAN: _ClassVar[RecordKind]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_STARTING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_CANCELLING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState
JOB_STATE_HELD: JobState
JOB_STATE_BACKOFF: JobState
JOB_STATE_PREEMPTING: JobState
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_PLANNED: WorkerState
WORKER_STATE_SPAWNED: WorkerState
WORKER_STATE_JOINED: WorkerState
WORKER_STATE_EXITED: WorkerState
WORKER_STATE_LOST: WorkerState
WORKER_STATE_UNKILLABLE: WorkerState
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_USER_ERROR: FailureReason
FAILURE_REASON_SIGNALLED: FailureReason
FAILURE_REASON_NODE_LOST: FailureReason
FAILURE_REASON_START_TIMEOUT: FailureReason
FAILURE_REASON_NUMERIC: FailureReason
FAILURE_REASON_INFRA: FailureReason
FAILURE_REASON_HANG: FailureReason
FAILURE_REASON_OOM_KILLED: FailureReason
RANK_ROLE_UNSPECIFIED: RankRole
RANK_ROLE_ROOT: RankRole
RANK_ROLE_FAILED: RankRole
RANK_ROLE_VICTIM: RankRole
RANK_ROLE_LOST: RankRole
RANK_ROLE_STOPPED: RankRole
RANK_ROLE_SUCCEEDED: RankRole
RANK_ROLE_UNFINISHED: RankRole
RECORD_KIND_UNSPECIFIED: RecordKind
RECORD_KIND_LOG: RecordKind
RECORD_KIND_TRACE: RecordKind
RECORD_KIND_STEPS: RecordKind
RECORD_KIND_PLAN: RecordKind

class Job(_message.Message):
    __slots__ = ("job_id", "name", "state", "pending_reason", "spec", "attempt", "fence", "submitted_at", "started_at", "finished_at", "workers", "plan", "progress", "failure", "event_seq", "restarts_used", "retry_at")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PENDING_REASON_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_USED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    state: JobState
    pending_reason: str
    spec: _spec_pb2.JobSpec
    attempt: int
    fence: int
    submitted_at: _timestamp_pb2.Timestamp
    started_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    plan: PlanSummary
    progress: Progress
    failure: Failure
    event_seq: int
    restarts_used: int
    retry_at: _timestamp_pb2.Timestamp
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., pending_reason: _Optional[str] = ..., spec: _Optional[_Union[_spec_pb2.JobSpec, _Mapping]] = ..., attempt: _Optional[int] = ..., fence: _Optional[int] = ..., submitted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., plan: _Optional[_Union[PlanSummary, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., event_seq: _Optional[int] = ..., restarts_used: _Optional[int] = ..., retry_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("rank", "replica", "stages", "node_id", "node_name", "device", "slot", "state", "pid", "exit_code", "exit_signal", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    EXIT_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    replica: int
    stages: _containers.RepeatedScalarFieldContainer[int]
    node_id: str
    node_name: str
    device: str
    slot: int
    state: WorkerState
    pid: int
    exit_code: int
    exit_signal: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., replica: _Optional[int] = ..., stages: _Optional[_Iterable[int]] = ..., node_id: _Optional[str] = ..., node_name: _Optional[str] = ..., device: _Optional[str] = ..., slot: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., exit_signal: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "steps", "loss", "tokens_per_s", "step_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    step_s: float
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ...) -> None: ...

class PlanSummary(_message.Message):
    __slots__ = ("graph_hash", "schedule", "num_chunks", "stages", "expected_step_s", "expected_bubble_ratio", "bit_equal")
    GRAPH_HASH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BUBBLE_RATIO_FIELD_NUMBER: _ClassVar[int]
    BIT_EQUAL_FIELD_NUMBER: _ClassVar[int]
    graph_hash: str
    schedule: str
    num_chunks: int
    stages: _containers.RepeatedCompositeFieldContainer[StageSummary]
    expected_step_s: float
    expected_bubble_ratio: float
    bit_equal: str
    def __init__(self, graph_hash: _Optional[str] = ..., schedule: _Optional[str] = ..., num_chunks: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageSummary, _Mapping]]] = ..., expected_step_s: _Optional[float] = ..., expected_bubble_ratio: _Optional[float] = ..., bit_equal: _Optional[str] = ...) -> None: ...

class StageSummary(_message.Message):
    __slots__ = ("index", "begins_at", "num_parameters", "parameter_bytes", "output_bytes", "forward_s", "backward_s", "compile", "buckets")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BEGINS_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    index: int
    begins_at: str
    num_parameters: int
    parameter_bytes: int
    output_bytes: int
    forward_s: float
    backward_s: float
    compile: str
    buckets: _containers.RepeatedCompositeFieldContainer[BucketSummary]
    def __init__(self, index: _Optional[int] = ..., begins_at: _Optional[str] = ..., num_parameters: _Optional[int] = ..., parameter_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., forward_s: _Optional[float] = ..., backward_s: _Optional[float] = ..., compile: _Optional[str] = ..., buckets: _Optional[_Iterable[_Union[BucketSummary, _Mapping]]] = ...) -> None: ...

class BucketSummary(_message.Message):
    __slots__ = ("size_bytes", "parameters")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    parameters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, size_bytes: _Optional[int] = ..., parameters: _Optional[_Iterable[str]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "rank", "node_name", "stages", "step", "message", "traceback", "log_tail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    reason: FailureReason
    rank: int
    node_name: str
    stages: _containers.RepeatedScalarFieldContainer[int]
    step: int
    message: str
    traceback: str
    log_tail: str
    def __init__(self, reason: _Optional[_Union[FailureReason, str]] = ..., rank: _Optional[int] = ..., node_name: _Optional[str] = ..., stages: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., log_tail: _Optional[str] = ...) -> None: ...

class RankAccount(_message.Message):
    __slots__ = ("rank", "node_name", "stages", "role", "message", "peer_rank", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node_name: str
    stages: _containers.RepeatedScalarFieldContainer[int]
    role: RankRole
    message: str
    peer_rank: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., node_name: _Optional[str] = ..., stages: _Optional[_Iterable[int]] = ..., role: _Optional[_Union[RankRole, str]] = ..., message: _Optional[str] = ..., peer_rank: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("event_seq", "at", "job_id", "node_name", "name", "reason")
    EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    event_seq: int
    at: _timestamp_pb2.Timestamp
    job_id: str
    node_name: str
    name: str
    reason: str
    def __init__(self, event_seq: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., job_id: _Optional[str] = ..., node_name: _Optional[str] = ..., name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ValidateRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _spec_pb2.JobSpec
    def __init__(self, spec: _Optional[_Union[_spec_pb2.JobSpec, _Mapping]] = ...) -> None: ...

class ValidateResponse(_message.Message):
    __slots__ = ("warnings",)
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "spec")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec: _spec_pb2.JobSpec
    def __init__(self, request_id: _Optional[str] = ..., spec: _Optional[_Union[_spec_pb2.JobSpec, _Mapping]] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("job_id", "replayed")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    replayed: bool
    def __init__(self, job_id: _Optional[str] = ..., replayed: _Optional[bool] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("live_only",)
    LIVE_ONLY_FIELD_NUMBER: _ClassVar[int]
    live_only: bool
    def __init__(self, live_only: _Optional[bool] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("job", "who", "why")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    job: str
    who: str
    why: str
    def __init__(self, job: _Optional[str] = ..., who: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class HoldResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("job", "who")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    job: str
    who: str
    def __init__(self, job: _Optional[str] = ..., who: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("job", "ranks", "follow", "tail_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    follow: bool
    tail_bytes: int
    def __init__(self, job: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., follow: _Optional[bool] = ..., tail_bytes: _Optional[int] = ...) -> None: ...

class LogsResponse(_message.Message):
    __slots__ = ("rank", "data", "next_offset")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    rank: int
    data: bytes
    next_offset: int
    def __init__(self, rank: _Optional[int] = ..., data: _Optional[bytes] = ..., next_offset: _Optional[int] = ...) -> None: ...

class FailureReportRequest(_message.Message):
    __slots__ = ("job", "attempt")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job: str
    attempt: int
    def __init__(self, job: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class FailureReportResponse(_message.Message):
    __slots__ = ("attempt", "fence", "stop_trigger", "outcome", "final", "failure", "ranks")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STOP_TRIGGER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    fence: int
    stop_trigger: str
    outcome: str
    final: bool
    failure: Failure
    ranks: _containers.RepeatedCompositeFieldContainer[RankAccount]
    def __init__(self, attempt: _Optional[int] = ..., fence: _Optional[int] = ..., stop_trigger: _Optional[str] = ..., outcome: _Optional[str] = ..., final: _Optional[bool] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankAccount, _Mapping]]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("job", "from_event_seq")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FROM_EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    job: str
    from_event_seq: int
    def __init__(self, job: _Optional[str] = ..., from_event_seq: _Optional[int] = ...) -> None: ...

class EventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("job", "from_event_seq")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FROM_EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    job: str
    from_event_seq: int
    def __init__(self, job: _Optional[str] = ..., from_event_seq: _Optional[int] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("events", "next_event_seq")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    next_event_seq: int
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., next_event_seq: _Optional[int] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("job", "kind")
    JOB_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    job: str
    kind: RecordKind
    def __init__(self, job: _Optional[str] = ..., kind: _Optional[_Union[RecordKind, str]] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("rank", "data")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    rank: int
    data: bytes
    def __init__(self, rank: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class HasRequest(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class HasResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: bool
    def __init__(self, present: _Optional[bool] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("sha256", "data")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    data: bytes
    def __init__(self, sha256: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ("sha256", "size_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class DownloadResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
