"""Where everything is: what one rank needs to know of the cut model to exchange values with the others.

Derived once from the spec, the placement and the agreement on who passes which argument; immutable afterwards.
Sizes are looked up per chunk size (`ChunkShapes`), since a remainder chunk is smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from stagekit.errors import UserError
from stagekit.plan.contract import Edge, InputRef, ModelSpec, TensorSpec
from stagekit.plan.shapes import evaluate

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride, dtype

MAX_VALUES = 256  # between two stages, per chunk
MAX_INPUTS = 128  # of the model; as many leaves of the target
TAG_HEADER, TAG_CLOCK, TAG_STATUS, TAG_INPUTS, TAG_VALUES = 1, 2, 3, 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """The cut model on its pipeline ranks."""

    spec: ModelSpec
    stage_ranks: tuple[int, ...]
    rank: int  # of this process in its pipeline
    num_chunks: int
    replica: int | None = None  # which one this pipeline is; None: there is no other

    @property
    def name(self) -> str:
        """This rank for people, as all replicas count."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """Return a rank of this pipeline for people."""
        return f"rank {rank}" if self.replica is None else f"rank {self.global_rank_of(rank)} (replica {self.replica})"

    def global_rank_of(self, rank: int) -> int:
        """Return where a rank of this pipeline is among those of all replicas."""
        return (self.replica or 0) * (max(self.stage_ranks) + 1) + rank

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Stages of this rank, ascending."""
        return tuple(s for s, r in enumerate(self.stage_ranks) if r == self.rank)

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return len(self.stage_ranks) - 1

    @property
    def last_rank(self) -> int:
        """The rank of the last stage."""
        return self.stage_ranks[-1]

    def edges_between(self, source: int, target: int, *, gradients: bool = False) -> tuple[Edge, ...]:
        """Return the values that go from one stage to another, or those whose gradients come back."""
        return tuple(
            edge
            for edge in self.spec.edges
            if edge.source == source and target in edge.targets and (edge.tensor.requires_grad or not gradients)
        )

    def __post_init__(self) -> None:
        """Raise UserError for more values than tags tell apart."""
        for source in range(len(self.stage_ranks)):
            for target in range(source + 1, len(self.stage_ranks)):
                if (count := len(self.edges_between(source, target))) > MAX_VALUES:
                    raise UserError(
                        f"stages {source} and {target} exchange {count} values; at most {MAX_VALUES} can be told apart: "
                        "choose another cut"
                    )
        if len(self.spec.inputs) > MAX_INPUTS:
            raise UserError(f"the model takes {len(self.spec.inputs)} arguments; a pipeline takes at most {MAX_INPUTS}")

    def readers_of(self, graph_input: int) -> frozenset[int]:
        """Return the ranks of the stages that read graph input number `graph_input`."""
        stages = (s for s in self.spec.stages if InputRef(graph_input) in s.inputs)
        return frozenset(self.stage_ranks[stage.index] for stage in stages)

    def tag(self, source: int, target: int, chunk: int, index: int, *, gradients: bool) -> int:
        """Return a number that no other transfer between the same two ranks has in a step."""
        route = (source * len(self.stage_ranks) + target) * 2 + gradients
        return TAG_VALUES + (route * self.num_chunks + chunk) * MAX_VALUES + index


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for the contract's name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def concrete(tensor: TensorSpec, symbols: Mapping[str, int]) -> Shape:
    """Return shape, stride and dtype of `tensor` for these symbol values."""
    return (
        tuple(evaluate(dim, symbols) for dim in tensor.shape),
        tuple(evaluate(dim, symbols) for dim in tensor.stride),
        torch_dtype(tensor.dtype),
    )


class ChunkShapes:
    """Shape of every edge for one chunk size, by value name; `contiguous` holds those that need no wire view.

    Complex values do: they may be conjugated only in name.
    """

    def __init__(self, spec: ModelSpec, symbols: Mapping[str, int]) -> None:
        self.symbols = dict(symbols)
        self.edges = {edge.value: concrete(edge.tensor, symbols) for edge in spec.edges}
        self.contiguous = {
            value
            for value, (shape, stride, dtype) in self.edges.items()
            if stride == contiguous_stride(shape) and not dtype.is_complex
        }


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
