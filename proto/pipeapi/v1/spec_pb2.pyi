from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Backend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKEND_UNSPECIFIED: _ClassVar[Backend]
    BACKEND_AUTO: _ClassVar[Backend]
    BACKEND_GLOO: _ClassVar[Backend]
    BACKEND_NCCL: _ClassVar[Backend]
BACKEND_UNSPECIFIED: Backend
BACKEND_AUTO: Backend
BACKEND_GLOO: Backend
BACKEND_NCCL: Backend

class JobSpec(_message.Message):
    __slots__ = ("name", "program", "params", "pipeline", "train", "backend", "resources", "checkpoint", "observe", "env", "redacted_env", "python", "source_sha256", "grace_s", "start_timeout_s", "init", "weights", "priority", "tenant", "restarts", "hang_timeout_s")
    class ParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ParamValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ParamValue, _Mapping]] = ...) -> None: ...
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    REDACTED_ENV_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SHA256_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    START_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    INIT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    HANG_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    program: str
    params: _containers.MessageMap[str, ParamValue]
    pipeline: PipelineSpec
    train: TrainSpec
    backend: Backend
    resources: ResourcesSpec
    checkpoint: CheckpointSpec
    observe: ObserveSpec
    env: _containers.ScalarMap[str, str]
    redacted_env: _containers.RepeatedScalarFieldContainer[str]
    python: str
    source_sha256: str
    grace_s: int
    start_timeout_s: int
    init: str
    weights: str
    priority: int
    tenant: str
    restarts: int
    hang_timeout_s: int
    def __init__(self, name: _Optional[str] = ..., program: _Optional[str] = ..., params: _Optional[_Mapping[str, ParamValue]] = ..., pipeline: _Optional[_Union[PipelineSpec, _Mapping]] = ..., train: _Optional[_Union[TrainSpec, _Mapping]] = ..., backend: _Optional[_Union[Backend, str]] = ..., resources: _Optional[_Union[ResourcesSpec, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointSpec, _Mapping]] = ..., observe: _Optional[_Union[ObserveSpec, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., redacted_env: _Optional[_Iterable[str]] = ..., python: _Optional[str] = ..., source_sha256: _Optional[str] = ..., grace_s: _Optional[int] = ..., start_timeout_s: _Optional[int] = ..., init: _Optional[str] = ..., weights: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., restarts: _Optional[int] = ..., hang_timeout_s: _Optional[int] = ...) -> None: ...

class ParamValue(_message.Message):
    __slots__ = ("null_value", "bool_value", "int_value", "double_value", "string_value", "list_value", "map_value")
    NULL_VALUE_FIELD_NUMBER: _ClassVar[int]
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    LIST_VALUE_FIELD_NUMBER: _ClassVar[int]
    MAP_VALUE_FIELD_NUMBER: _ClassVar[int]
    null_value: bool
    bool_value: bool
    int_value: int
    double_value: float
    string_value: str
    list_value: ParamList
    map_value: ParamMap
    def __init__(self, null_value: _Optional[bool] = ..., bool_value: _Optional[bool] = ..., int_value: _Optional[int] = ..., double_value: _Optional[float] = ..., string_value: _Optional[str] = ..., list_value: _Optional[_Union[ParamList, _Mapping]] = ..., map_value: _Optional[_Union[ParamMap, _Mapping]] = ...) -> None: ...

class ParamList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[ParamValue]
    def __init__(self, values: _Optional[_Iterable[_Union[ParamValue, _Mapping]]] = ...) -> None: ...

class ParamMap(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ParamValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ParamValue, _Mapping]] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.MessageMap[str, ParamValue]
    def __init__(self, values: _Optional[_Mapping[str, ParamValue]] = ...) -> None: ...

class PipelineSpec(_message.Message):
    __slots__ = ("stages", "stages_per_rank", "replicas", "schedule", "chunks", "split", "split_at", "bucket_cap_bytes", "bucket_first_cap_bytes", "compile", "recompute", "balance", "stages_of_ranks", "schedule_csv", "bucket_compress")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STAGES_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_AT_FIELD_NUMBER: _ClassVar[int]
    BUCKET_CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIRST_CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    STAGES_OF_RANKS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_CSV_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COMPRESS_FIELD_NUMBER: _ClassVar[int]
    stages: int
    stages_per_rank: int
    replicas: int
    schedule: str
    chunks: int
    split: str
    split_at: _containers.RepeatedScalarFieldContainer[str]
    bucket_cap_bytes: int
    bucket_first_cap_bytes: int
    compile: str
    recompute: bool
    balance: BalanceSpec
    stages_of_ranks: _containers.RepeatedScalarFieldContainer[int]
    schedule_csv: str
    bucket_compress: str
    def __init__(self, stages: _Optional[int] = ..., stages_per_rank: _Optional[int] = ..., replicas: _Optional[int] = ..., schedule: _Optional[str] = ..., chunks: _Optional[int] = ..., split: _Optional[str] = ..., split_at: _Optional[_Iterable[str]] = ..., bucket_cap_bytes: _Optional[int] = ..., bucket_first_cap_bytes: _Optional[int] = ..., compile: _Optional[str] = ..., recompute: _Optional[bool] = ..., balance: _Optional[_Union[BalanceSpec, _Mapping]] = ..., stages_of_ranks: _Optional[_Iterable[int]] = ..., schedule_csv: _Optional[str] = ..., bucket_compress: _Optional[str] = ...) -> None: ...

class BalanceSpec(_message.Message):
    __slots__ = ("memory_bytes", "optimizer_state", "speeds", "block_boundaries")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STATE_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    optimizer_state: float
    speeds: _containers.RepeatedScalarFieldContainer[float]
    block_boundaries: bool
    def __init__(self, memory_bytes: _Optional[int] = ..., optimizer_state: _Optional[float] = ..., speeds: _Optional[_Iterable[float]] = ..., block_boundaries: _Optional[bool] = ...) -> None: ...

class TrainSpec(_message.Message):
    __slots__ = ("steps", "clip_grad_norm", "seed", "log_every", "eval_every", "accumulate", "precision")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CLIP_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOG_EVERY_FIELD_NUMBER: _ClassVar[int]
    EVAL_EVERY_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    steps: int
    clip_grad_norm: float
    seed: int
    log_every: int
    eval_every: int
    accumulate: int
    precision: str
    def __init__(self, steps: _Optional[int] = ..., clip_grad_norm: _Optional[float] = ..., seed: _Optional[int] = ..., log_every: _Optional[int] = ..., eval_every: _Optional[int] = ..., accumulate: _Optional[int] = ..., precision: _Optional[str] = ...) -> None: ...

class ResourcesSpec(_message.Message):
    __slots__ = ("device", "slots_per_node", "placement", "node_selector", "memory_bytes")
    class NodeSelectorEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_NODE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    NODE_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    slots_per_node: int
    placement: str
    node_selector: _containers.ScalarMap[str, str]
    memory_bytes: int
    def __init__(self, device: _Optional[str] = ..., slots_per_node: _Optional[int] = ..., placement: _Optional[str] = ..., node_selector: _Optional[_Mapping[str, str]] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class CheckpointSpec(_message.Message):
    __slots__ = ("dir",)
    DIR_FIELD_NUMBER: _ClassVar[int]
    dir: str
    def __init__(self, dir: _Optional[str] = ...) -> None: ...

class ObserveSpec(_message.Message):
    __slots__ = ("trace_steps",)
    TRACE_STEPS_FIELD_NUMBER: _ClassVar[int]
    trace_steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, trace_steps: _Optional[_Iterable[int]] = ...) -> None: ...
