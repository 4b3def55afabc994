"""Which dimension of an argument carries the batch: said by the caller or inferred, never guessed.

Example inputs are one chunk. graph.capture calls `batch_dims`; a doubtful argument is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_flatten_with_path, tree_leaves

from stagekit.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Split:
    """The batch is cut into chunks along `dim`."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every chunk gets the whole value."""


Spec = Split | Replicate


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of (args, kwargs) in pytree order; `spec` is what the caller said about it, if anything."""

    name: str  # "args[0]", "kwargs['mask']['key']"
    value: Any
    spec: Spec | None


def flatten_named(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    args_spec: Sequence[Spec | None] | Mapping[int, Spec] | None = None,
    kwargs_spec: Mapping[str, Spec] | None = None,
) -> tuple[list[Leaf], Any]:
    """Return the leaves of (args, kwargs) with their names and the caller's specs, and the tree's structure."""
    positional = dict(enumerate(args_spec)) if isinstance(args_spec, Sequence) else dict(args_spec or {})
    said: tuple[Mapping[Any, Spec | None], ...] = (positional, dict(kwargs_spec or {}))
    register_dataclasses((args, dict(kwargs)))
    with_path, tree = tree_flatten_with_path((args, dict(kwargs)))
    leaves = []
    for path, value in with_path:
        side = path[0].idx  # type: ignore[attr-defined]
        key = getattr(path[1], "idx", getattr(path[1], "key", None))
        text = "".join(str(part) for part in path[1:])
        leaves.append(Leaf(("args", "kwargs")[side] + text, value, said[side].get(key)))
    _refuse_unknown(said, args, kwargs)
    return leaves, tree


def register_dataclasses(tree: Any) -> None:
    """Let pytrees look into the dataclasses found in `tree`, as they look into tuples and dicts."""
    todo = [tree]
    while todo:
        for leaf in tree_leaves(todo.pop()):
            if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                register_dataclass(type(leaf))
                todo.append(leaf)


def _refuse_unknown(said: tuple[Mapping[Any, Any], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for key in said[0]:
        if not 0 <= key < len(args):
            raise ShapeError(f"args_spec names argument {key}, but the example has {len(args)} positional arguments")
    for key in said[1]:
        if key not in kwargs:
            raise ShapeError(f"kwargs_spec names {key!r}, but the example has only {sorted(kwargs)}")


def batch_dims(leaves: Sequence[Leaf]) -> list[int | None]:
    """Return per leaf the dimension along which a batch is split, None for a leaf that every chunk gets whole."""
    first = next((leaf for leaf in leaves if _may_carry_batch(leaf)), None)
    if first is None:
        return [None] * len(leaves)
    first_dim = first.spec.dim if isinstance(first.spec, Split) else 0
    if not -first.value.ndim <= first_dim < first.value.ndim:
        raise ShapeError(f"{first.name} has shape {tuple(first.value.shape)}; it can't be split along {first_dim}")
    size = int(first.value.shape[first_dim])
    return [_batch_dim(leaf, first, size) for leaf in leaves]


def _may_carry_batch(leaf: Leaf) -> bool:
    return isinstance(leaf.value, Tensor) and leaf.value.ndim > 0 and not isinstance(leaf.spec, Replicate)


def _batch_dim(leaf: Leaf, first: Leaf, size: int) -> int | None:
    if not _may_carry_batch(leaf):
        if isinstance(leaf.spec, Split):
            raise ShapeError(f"{leaf.name} is {leaf.value!r}; only a tensor with dimensions can be split")
        return None
    shape = tuple(leaf.value.shape)
    if isinstance(leaf.spec, Split):
        dim = leaf.spec.dim
        if not -len(shape) <= dim < len(shape) or shape[dim] != size:
            raise ShapeError(
                f"{leaf.name} has shape {shape}; Split({dim}) does not find {first.name}'s {size} rows there"
            )
        return dim % len(shape)
    if leaf is first:
        return 0
    as_first = shape[:2] == tuple(first.value.shape[:2]) and leaf.value.ndim == first.value.ndim
    if size == 1:
        doubtful = shape[0] == 1 and not as_first
        carries = as_first
    else:
        square = len(shape) == 2 and shape[0] == shape[1] == size and not as_first
        doubtful = square or (shape[0] != size and size in shape[1:])
        carries = shape[0] == size
    if doubtful:
        raise ShapeError(
            f"{leaf.name} has shape {shape} and the chunk has {size} rows (dimension 0 of {first.name}): "
            f"it is not clear whether it carries the batch; say Split(dim) or Replicate() in args_spec or kwargs_spec"
        )
    return 0 if carries else None


def symbolic_dims(value: Tensor, batch_dim: int | None) -> list[int]:
    """Return the dimensions of an input that the capture tries to keep symbolic: the batch's and a sequence's."""
    if batch_dim is None or not value.dtype.is_floating_point:
        dims = list(range(value.ndim))
    else:
        dims = [batch_dim, *([1] if value.ndim == 3 and batch_dim == 0 else [])]
    return [dim for dim in dims if value.shape[dim] > 1 or dim == batch_dim]


def example_rows(value: Tensor, batch_dim: int | None) -> torch.Size:
    """Return the shape to capture with: one row becomes two, because export would burn a size of one in."""
    shape = list(value.shape)
    if batch_dim is not None:
        shape[batch_dim] = max(2, shape[batch_dim])
    return torch.Size(shape)
