"""Outputs of chunks put together again: one rule per leaf of what the model returns.

The default concatenates a leaf that carries the batch and takes the weighted mean of a floating-point scalar; anything
else must be equal in all chunks. `output_spec` of stagekit.pipeline says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stagekit.errors import UserError
from stagekit.plan.contract import OutputSpec


@dataclass(frozen=True, slots=True)
class Cat:
    """Concatenate the chunks along `dim`."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Stack:
    """Stack the chunks along a new first dimension: [chunks, …]."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Add the chunks."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Average the chunks, weighted as the loss weighs them; by their rows where losses are added or there is none."""


Rule = Cat | Stack | Sum | Mean | Callable[[list[Tensor]], Any]


def flatten_rules(output_spec: Any, outputs: Sequence[OutputSpec]) -> tuple[Rule | None, ...]:
    """Return one rule (None: the default) per output leaf.

    `output_spec` is one rule for every tensor, or a structure like the output's. Raises UserError for another one.
    """
    if output_spec is None or _is_rule(output_spec):
        return tuple(output_spec if output.value is not None else None for output in outputs)
    rules = pytree.tree_leaves(output_spec, is_leaf=lambda leaf: leaf is None or _is_rule(leaf))
    wrong = [rule for rule in rules if rule is not None and not _is_rule(rule)]
    if wrong:
        raise UserError(
            f"output_spec holds {wrong[0]!r}; use Cat(dim), Stack(), Sum(), Mean() or a function of the chunks"
        )
    if len(rules) != len(outputs):
        raise UserError(f"output_spec has {len(rules)} leaves, the model returns {len(outputs)}")
    return tuple(rules)


def _is_rule(value: object) -> bool:
    return isinstance(value, (Cat, Stack, Sum, Mean)) or callable(value)


def merge_outputs(
    outputs: Sequence[OutputSpec],
    rules: Sequence[Rule | None],
    chunks: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
) -> list[Any]:
    """Return the model's output leaves for the whole batch; `chunks` hold values by name, in chunk order.

    Empty `rules` mean the defaults. Raises UserError for a leaf that no default fits.
    """
    leaves: list[Any] = []
    for number, (output, rule) in enumerate(zip(outputs, rules or (None,) * len(outputs), strict=True)):
        if output.value is None:
            leaves.append(output.constant)
        else:
            parts = [chunk[output.value] for chunk in chunks]
            leaves.append(_merge(parts, rule or _default(number, output, parts), weights))
    return leaves


def _default(number: int, output: OutputSpec, parts: list[Tensor]) -> Rule:
    if output.merge_dim is not None:
        return Cat(output.merge_dim)
    if parts[0].ndim == 0 and parts[0].is_floating_point():
        return Mean()
    if all(torch.equal(parts[0], part) for part in parts[1:]):
        return lambda parts: parts[0]
    raise UserError(
        f"output leaf {number}, {parts[0].dtype} {tuple(parts[0].shape)}, has no batch dimension and differs between "
        "chunks; say with output_spec how to merge it: Sum(), Mean(), Stack() or a function"
    )


def _merge(parts: list[Tensor], rule: Rule, weights: Sequence[float]) -> Any:
    match rule:
        case Cat(dim):
            return torch.cat(parts, dim)
        case Stack():
            return torch.stack(parts)
        case Sum():
            return torch.stack(parts).sum(0)
        case Mean():
            shares = [weight / sum(weights) for weight in weights]
            return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)
    return rule(parts)
