"""The stage contract: what stagekit.graph promises and stagekit.run relies on.

Pure data. A stage is a module that takes flat tensors (and symbol values) and always returns a tuple of tensors:
it never mutates an input, no output aliases an input, and its parameters and buffers carry the names they have in
the unsplit model. A value may go to several later stages; its gradients come back from each and are summed.
Graph inputs may go to any stage. Values of the last stage named by `outputs` are what the model returned.
"""

from __future__ import annotations

from dataclasses import dataclass

Dim = int | str  # a size, or an expression over symbol names: "s0", "2*s0 + 1"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, layout and type of a tensor for one chunk.

    `shape` and `stride` are in elements and may be expressions over `Symbol` names. `dtype` is torch's name
    without "torch.". `requires_grad`: a gradient flows back through it.
    """

    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dtype: str
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbolic size, read off dimension `dim` of graph input `graph_input`."""

    name: str
    example: int
    minimum: int
    maximum: int | None
    graph_input: int
    dim: int
    is_batch: bool  # chunks differ in it, and a batch is split along it


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Why dimension `dim` of graph input `graph_input` is the example's for every chunk, with the line, for people."""

    graph_input: int
    dim: int
    reason: str


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One leaf of (args, kwargs), in pytree order.

    `tensor` is None for a leaf that is no tensor: its value `constant` is burned in, and a different one is refused.
    `split_dim` is the dimension that carries the batch; None means that every chunk gets the whole tensor.
    """

    name: str  # as a user would write it: "args[0]", "kwargs['mask']"
    tensor: TensorSpec | None
    split_dim: int | None = None
    constant: object = None


@dataclass(frozen=True, slots=True)
class InputRef:
    """A stage input that is graph input number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A stage input that an earlier stage made: the edge whose `value` it names."""

    value: str


@dataclass(frozen=True, slots=True)
class SymbolRef:
    """A stage input that is the size called `symbol`, a Python int."""

    symbol: str


StageInput = InputRef | ValueRef | SymbolRef


@dataclass(frozen=True, slots=True)
class Edge:
    """A value made by stage `source` and read by the later stages `targets` (ascending)."""

    value: str
    source: int
    targets: tuple[int, ...]
    tensor: TensorSpec


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter of a stage under its name in the unsplit model.

    `is_reached`: a gradient of some output depends on it. One that is not reached keeps no gradient, under any cut.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    size_bytes: int
    is_reached: bool = True


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced together; one submodule of the stage."""

    size_bytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: flat inputs in call order, names of the values it returns, what it owns, what it costs."""

    index: int
    begins_at: str  # module path of its first node, for people
    first_node: str  # name of its first node in the capture: the cut
    inputs: tuple[StageInput, ...]
    outputs: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[str, ...]
    buckets: tuple[Bucket, ...]  # last layers first: the order in which gradients become ready
    forward_s: float = 0.0
    backward_s: float = 0.0
    input_grad_s: float = 0.0  # of a backward in two halves, as an eager stage runs it: what can wait is the other one
    weight_grad_s: float = 0.0
    draws: bool = False  # holds random operations


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One leaf of what the model returns: a value of the last stage, or a burned-in constant.

    `merge_dim`: chunks are concatenated along it; None: the leaf has no batch dimension.
    """

    value: str | None
    tensor: TensorSpec | None
    merge_dim: int | None = None
    constant: object = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A captured model cut into stages; equal on every rank that captured the same model."""

    inputs: tuple[GraphInput, ...]
    symbols: tuple[Symbol, ...]
    stages: tuple[StageSpec, ...]
    edges: tuple[Edge, ...]
    outputs: tuple[OutputSpec, ...]
    aliases: tuple[tuple[str, str], ...]  # (alias, canonical) names of tied parameters
    graph_hash: str
    self_check: str  # "values", "structural" or "none (reason)"
    split_report: str  # how the cut was chosen and its gap to the lower bound, for people
    guards: tuple[str, ...] = ()  # conditions over symbols that hold for the capture; another size is another model
    fixed: tuple[FixedSize, ...] = ()  # sizes that one would expect to differ between chunks
    start_values: str = ""  # how each stage's values are made and what that costs, for people
