import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_DISCONNECTED: _ClassVar[NodeState]
    NODE_STATE_LOST: _ClassVar[NodeState]
    NODE_STATE_FENCED: _ClassVar[NodeState]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_DISCONNECTED: NodeState
NODE_STATE_LOST: NodeState
NODE_STATE_FENCED: NodeState

class Slot(_message.Message):
    __slots__ = ("index", "device", "uuid")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    index: int
    device: str
    uuid: str
    def __init__(self, index: _Optional[int] = ..., device: _Optional[str] = ..., uuid: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "node_name", "state", "incarnation", "version", "data_address", "metrics_address", "slots", "slots_used", "lease_age_s", "cordon", "drain", "attempts", "labels", "quarantine", "strikes", "clock_offset_s", "clock_error_s", "edges")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    LEASE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    CORDON_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    STRIKES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    node_name: str
    state: NodeState
    incarnation: int
    version: str
    data_address: str
    metrics_address: str
    slots: _containers.RepeatedCompositeFieldContainer[Slot]
    slots_used: int
    lease_age_s: float
    cordon: Cordon
    drain: Drain
    attempts: _containers.RepeatedCompositeFieldContainer[NodeAttempt]
    labels: _containers.ScalarMap[str, str]
    quarantine: Quarantine
    strikes: int
    clock_offset_s: float
    clock_error_s: float
    edges: _containers.RepeatedCompositeFieldContainer[NodeEdge]
    def __init__(self, node_id: _Optional[str] = ..., node_name: _Optional[str] = ..., state: _Optional[_Union[NodeState, str]] = ..., incarnation: _Optional[int] = ..., version: _Optional[str] = ..., data_address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., slots: _Optional[_Iterable[_Union[Slot, _Mapping]]] = ..., slots_used: _Optional[int] = ..., lease_age_s: _Optional[float] = ..., cordon: _Optional[_Union[Cordon, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[NodeAttempt, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., quarantine: _Optional[_Union[Quarantine, _Mapping]] = ..., strikes: _Optional[int] = ..., clock_offset_s: _Optional[float] = ..., clock_error_s: _Optional[float] = ..., edges: _Optional[_Iterable[_Union[NodeEdge, _Mapping]]] = ...) -> None: ...

class NodeEdge(_message.Message):
    __slots__ = ("node_name", "rtt_s", "bytes_per_s")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    rtt_s: float
    bytes_per_s: float
    def __init__(self, node_name: _Optional[str] = ..., rtt_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Cordon(_message.Message):
    __slots__ = ("who", "why", "at")
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    who: str
    why: str
    at: _timestamp_pb2.Timestamp
    def __init__(self, who: _Optional[str] = ..., why: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("who", "why", "at", "deadline")
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    who: str
    why: str
    at: _timestamp_pb2.Timestamp
    deadline: _timestamp_pb2.Timestamp
    def __init__(self, who: _Optional[str] = ..., why: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Quarantine(_message.Message):
    __slots__ = ("why", "at", "until")
    WHY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    why: str
    at: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    def __init__(self, why: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class NodeAttempt(_message.Message):
    __slots__ = ("fence", "job_id", "name", "state", "slots")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    job_id: str
    name: str
    state: str
    slots: int
    def __init__(self, fence: _Optional[int] = ..., job_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., slots: _Optional[int] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class CordonNodeRequest(_message.Message):
    __slots__ = ("node", "who", "why")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    node: str
    who: str
    why: str
    def __init__(self, node: _Optional[str] = ..., who: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class CordonNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class UncordonNodeRequest(_message.Message):
    __slots__ = ("node", "who")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    node: str
    who: str
    def __init__(self, node: _Optional[str] = ..., who: _Optional[str] = ...) -> None: ...

class UncordonNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node", "who", "why", "within_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    who: str
    why: str
    within_s: float
    def __init__(self, node: _Optional[str] = ..., who: _Optional[str] = ..., why: _Optional[str] = ..., within_s: _Optional[float] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class ForgetNodeRequest(_message.Message):
    __slots__ = ("node", "who", "why")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    node: str
    who: str
    why: str
    def __init__(self, node: _Optional[str] = ..., who: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class ForgetNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class GetVersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionResponse(_message.Message):
    __slots__ = ("version", "cluster_id", "coordinator_epoch", "http_address")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    version: str
    cluster_id: str
    coordinator_epoch: int
    http_address: str
    def __init__(self, version: _Optional[str] = ..., cluster_id: _Optional[str] = ..., coordinator_epoch: _Optional[int] = ..., http_address: _Optional[str] = ...) -> None: ...
