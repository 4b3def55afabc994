"""Chunks of a step: graph inputs and targets cut along the batch.

Knows shapes only; pure functions of a model's spec and of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stagekit.errors import ShapeError, UserError
from stagekit.plan.contract import ModelSpec, Symbol
from stagekit.plan.shapes import holds


def batch_rows(spec: ModelSpec, leaves: Sequence[Any]) -> int | None:
    """Return the rows of the batch that `leaves` hold, None when no leaf that carries the batch is here.

    Raises ShapeError when two inputs disagree.
    """
    found: tuple[str, int] | None = None
    for declared, leaf in zip(spec.inputs, leaves, strict=True):
        if isinstance(leaf, Tensor) and declared.split_dim is not None:
            rows = leaf.shape[declared.split_dim]
            if found and found[1] != rows:
                raise ShapeError(f"{declared.name} has {rows} rows but {found[0]} has {found[1]}; one batch, one size")
            found = found or (declared.name, rows)
    return found[1] if found else None


def symbol_values(spec: ModelSpec, leaves: Sequence[Any], sizes: Sequence[int]) -> dict[int, dict[str, int]]:
    """Return the symbols' values for each distinct chunk size, read off the whole inputs.

    Raises ShapeError for a size outside a symbol's range, and for a fixed chunk size that differs.
    """
    base: dict[str, int] = {}
    for symbol in spec.symbols:
        leaf = leaves[symbol.graph_input]
        if not symbol.is_batch and isinstance(leaf, Tensor):
            base[symbol.name] = leaf.shape[symbol.dim]
    result = {}
    for size in set(sizes):
        values = dict(base)
        values.update({symbol.name: size for symbol in spec.symbols if symbol.is_batch})
        for symbol in spec.symbols:
            value = values.get(symbol.name)
            if value is not None and not symbol.minimum <= value <= (symbol.maximum or value):
                raise ShapeError(_out_of_range(spec, symbol, value, sizes))
        _check_guards(spec, values)
        result[size] = values
    return result


def _out_of_range(spec: ModelSpec, symbol: Symbol, value: int, sizes: Sequence[int]) -> str:
    name, limits = spec.inputs[symbol.graph_input].name, f"{symbol.minimum}..{symbol.maximum or '∞'}"
    if not symbol.is_batch:
        return f"{name} has size {value} in dimension {symbol.dim}; the model was captured for {limits}"
    least, most = symbol.minimum * len(sizes), (symbol.maximum or 0) * len(sizes)
    enough = f"at least {least} rows or fewer chunks" if value < symbol.minimum else f"at most {most} or more chunks"
    return (
        f"{name}: {sum(sizes)} rows in {len(sizes)} chunks make a chunk of {value}, and the model was captured for {limits} "
        f"rows (BatchNorm, say, needs 2); give {enough}"
    )


def _check_guards(spec: ModelSpec, values: dict[str, int]) -> None:
    for guard in spec.guards:
        if holds(guard, values):
            continue
        read = [symbol for symbol in spec.symbols if re.search(rf"\b{symbol.name}\b", guard)]
        sizes = ", ".join(
            f"{symbol.name} = {values[symbol.name]} is dimension {symbol.dim} of {spec.inputs[symbol.graph_input].name}"
            for symbol in read
        )
        raise ShapeError(
            f"the model branches on sizes and was captured where {guard}; here {sizes}, where it is another model: "
            "pad to sizes for which that holds, or capture it with these"
        )


def check_fixed_shapes(spec: ModelSpec, leaves: Sequence[Any], sizes: Sequence[int]) -> None:
    """Raise ShapeError for an input whose fixed dimensions or dtype differ from the capture's."""
    for index, (declared, leaf) in enumerate(zip(spec.inputs, leaves, strict=True)):
        if not isinstance(leaf, Tensor) or declared.tensor is None:
            continue
        want = declared.tensor
        if str(leaf.dtype).removeprefix("torch.") != want.dtype:
            raise ShapeError(f"{declared.name} is {leaf.dtype}; the model was captured with torch.{want.dtype}")
        if leaf.ndim != len(want.shape):
            raise ShapeError(
                f"{declared.name} has {leaf.ndim} dimensions; the model was captured with {len(want.shape)}"
            )
        for dim, size in enumerate(want.shape):
            here = {leaf.shape[dim]} if dim != declared.split_dim else set(sizes)
            if isinstance(size, int) and here != {size}:
                what = "chunks of" if dim == declared.split_dim else "size"
                why = next((f" ({f.reason})" for f in spec.fixed if (f.graph_input, f.dim) == (index, dim)), "")
                raise ShapeError(
                    f"{declared.name}, dimension {dim}: {what} {sorted(here)}, but the model was captured with {size}{why}; "
                    "capture it with the sizes that you train with"
                )


def check_mode(device: str, call: str, *, train: bool) -> None:
    """Raise UserError where `call` is made under a mode of the caller's that would change what the captured stages compute, or what they send."""
    for kind in {"cpu", device}:
        if torch.is_autocast_enabled(kind):
            raise UserError(
                f"{call} is called under torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)}), which would change what "
                f"the captured model computes and sends; enter autocast inside the model's forward, or call {call} outside of it"
            )
    if train and torch.is_inference_mode_enabled():
        raise UserError(
            f"{call} is called under torch.inference_mode(), where nothing can train; use eval(), or leave it"
        )


def check_target(leaves: Sequence[Any], rows: int) -> None:
    """Raise ShapeError for a leaf of the target whose first dimension is not the batch: broadcasting would make a wrong
    loss of it.
    """
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] != rows:
            raise ShapeError(
                f"the target's leaf {number} has shape {tuple(leaf.shape)}, but the batch has {rows} rows; "
                "its first dimension must be the batch (a scalar goes to every chunk whole)"
            )


def split_target(leaves: Sequence[Tensor], rows: int, sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Return, per chunk, the target's leaves: cut along dim 0, a scalar whole. Raises ShapeError like `check_target`."""
    check_target(leaves, rows)
    parts = [torch.split(leaf, list(sizes), 0) if leaf.ndim else (leaf,) * len(sizes) for leaf in leaves]
    return list(zip(*parts, strict=True)) if parts else [()] * len(sizes)
