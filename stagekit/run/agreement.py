"""Who passes what: agreed once, on the first step, by one exchange of JSON; then frozen.

Each rank says which graph inputs and target it was given. From that every rank derives the same ownership, so that the
lists with their SEND_X / RECV_X are equal everywhere. Per step the first rank then sends a header of int64s: the rows
of the batch, symbol values and the target's sizes. No pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from stagekit.errors import UserError
from stagekit.plan.contract import InputRef, ModelSpec
from stagekit.plan.shapes import evaluate
from stagekit.run.inputs import Parcel
from stagekit.run.layout import MAX_INPUTS, Placement


@dataclass(frozen=True, slots=True)
class Given:
    """What one rank was given: flags per graph input; the target's structure, dtypes and numbers of dimensions."""

    inputs: tuple[bool, ...]
    target_tree: str | None
    target_dtypes: tuple[str, ...]
    target_ndims: tuple[int, ...]
    plan: str  # hash of graph, schedule and counts: equal on every rank

    @classmethod
    def of(cls, leaves: Sequence[Any], target: Any, plan: str) -> Given:
        """Describe a rank's arguments. Raises UserError for a target that holds more than tensors."""
        if target is None:
            return cls(tuple(isinstance(leaf, Tensor) for leaf in leaves), None, (), (), plan)
        target_leaves, tree = pytree.tree_flatten(target)
        if not all(isinstance(leaf, Tensor) for leaf in target_leaves):
            kinds = sorted({type(leaf).__name__ for leaf in target_leaves if not isinstance(leaf, Tensor)})
            raise UserError(
                f"the target holds {', '.join(kinds)}; it must consist of tensors (in tuples, lists, dicts)"
            )
        if len(target_leaves) > MAX_INPUTS:
            raise UserError(f"the target holds {len(target_leaves)} tensors; at most {MAX_INPUTS} can be told apart")
        return cls(
            tuple(isinstance(leaf, Tensor) for leaf in leaves),
            pytree.treespec_dumps(tree),
            tuple(str(leaf.dtype).removeprefix("torch.") for leaf in target_leaves),
            tuple(leaf.ndim for leaf in target_leaves),
            plan,
        )

    def to_json(self) -> str:
        return json.dumps([self.inputs, self.target_tree, self.target_dtypes, self.target_ndims, self.plan])

    @classmethod
    def from_json(cls, text: str) -> Given:
        inputs, tree, dtypes, ndims, plan = json.loads(text)
        return cls(tuple(inputs), tree, tuple(dtypes), tuple(ndims), plan)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a pipeline agreed on."""

    parcels: dict[tuple[int, int], Parcel]  # (owner's stage, stage that needs it)
    target: Given | None  # description by the rank whose target is used

    @property
    def target_tree(self) -> Any:
        """Structure of the target; None without one."""
        return pytree.treespec_loads(self.target.target_tree) if self.target and self.target.target_tree else None


def exchange_text(text: str, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """Return the `text` of every rank of `group` (None: the world), in rank order."""
    world = dist.get_world_size(group)
    raw = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(raw)], dtype=torch.int64, device=device), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(parts, mine, group=group)
    return [bytes(part[: int(size)].tolist()).decode() for part, size in zip(parts, sizes, strict=True)]


def agree(placement: Placement, given: Sequence[Given], *, has_loss: bool) -> Agreement:
    """Return who sends what to whom. `given` is in rank order. Raises UserError, on every rank alike."""
    plans = {g.plan for g in given}
    if len(plans) > 1:
        ranks = {plan: [r for r, g in enumerate(given) if g.plan == plan] for plan in sorted(plans)}
        raise UserError(f"the ranks captured or scheduled different things: {ranks}; run the same program everywhere")
    parcels: dict[tuple[int, int], Parcel] = {}
    for rank in sorted(set(placement.stage_ranks)):
        stages = [stage for stage, owner in enumerate(placement.stage_ranks) if owner == rank]
        wanted = _inputs_of(placement.spec, stages)
        for number in wanted:
            if not given[rank].inputs[number]:
                owner = next((r for r, g in enumerate(given) if g.inputs[number]), None)
                name = placement.spec.inputs[number].name
                if owner is None:
                    raise UserError(f"{name} was passed on no rank, but rank {rank} (stages {stages}) needs it")
                _add(parcels, placement, owner, stages[0], inputs=(number,))
    target = _target(placement, given, parcels) if has_loss else None
    return Agreement(parcels, target)


def _inputs_of(spec: ModelSpec, stages: Sequence[int]) -> list[int]:
    return sorted({ref.index for s in stages for ref in spec.stages[s].inputs if isinstance(ref, InputRef)
                   and spec.inputs[ref.index].tensor is not None})  # fmt: skip


def _add(
    parcels: dict[tuple[int, int], Parcel],
    placement: Placement,
    owner: int,
    stage: int,
    *,
    inputs: tuple[int, ...] = (),
    target: tuple[int, ...] = (),
) -> None:
    key = (placement.stage_ranks.index(owner), stage)
    before = parcels.get(key, Parcel((), ()))
    parcels[key] = Parcel(before.inputs + inputs, before.target + target)


def _target(placement: Placement, given: Sequence[Given], parcels: dict[tuple[int, int], Parcel]) -> Given | None:
    """Return whose target is used; None: nobody has one, the model computes its loss itself."""
    last = placement.last_rank
    if given[last].target_tree is not None:
        return given[last]
    if given[0].target_tree is None:
        elsewhere = [rank for rank, g in enumerate(given) if g.target_tree is not None]
        if elsewhere:
            raise UserError(
                f"the target was passed on rank {elsewhere[0]}; pass it on rank 0 or {last}, first or last stage"
            )
        return None
    _add(parcels, placement, 0, placement.last_stage, target=tuple(range(len(given[0].target_ndims))))
    return given[0]


# ---- the header of a step


@dataclass(frozen=True, slots=True)
class Header:
    """What every rank must know of a step before it posts a receive."""

    rows: int
    symbols: tuple[int, ...]  # of those that are no batch, in the spec's order
    target_sizes: tuple[tuple[int, ...], ...]
    is_refused: bool = False  # by the first rank: every rank goes through its list with stand-ins of these sizes

    @classmethod
    def refused(cls, spec: ModelSpec, num_chunks: int, target_ndims: Sequence[int]) -> Header:
        """Return the header of a step that does not run: the captured example in every chunk."""
        examples = {symbol.name: symbol.example for symbol in spec.symbols}
        batch = next((i for i in spec.inputs if i.tensor is not None and i.split_dim is not None), None)
        rows = 1
        if batch is not None and batch.tensor is not None and batch.split_dim is not None:
            rows = evaluate(batch.tensor.shape[batch.split_dim], examples)
        fixed = tuple(symbol.example for symbol in spec.symbols if not symbol.is_batch)
        return cls(rows * num_chunks, fixed, tuple((1,) * ndim for ndim in target_ndims), is_refused=True)

    def pack(self) -> list[int]:
        """Return the header as numbers."""
        return [
            -self.rows if self.is_refused else self.rows,
            *self.symbols,
            *(size for leaf in self.target_sizes for size in leaf),
        ]

    @classmethod
    def unpack(cls, flat: Sequence[int], num_symbols: int, target_ndims: Sequence[int]) -> Header:
        """Inverse of `pack`."""
        sizes, at = [], 1 + num_symbols
        for ndim in target_ndims:
            sizes.append(tuple(flat[at : at + ndim]))
            at += ndim
        return cls(abs(flat[0]), tuple(flat[1 : 1 + num_symbols]), tuple(sizes), is_refused=flat[0] < 0)
