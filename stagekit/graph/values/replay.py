"""The log of a constructor, and its replay: values by address, computed again from what graph.values.recorder wrote down.

Decides which logged operations a wanted value depends on and how the generator stands before each random one. Knows
nothing of modules and names. Called by graph.values.recorder (to look at a value while recording) and by graph.values.build.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, slots=True)
class Address:
    """A tensor as a place: a window on the storage numbered `key`."""

    key: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that this address names in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Entry:
    """One logged operation.

    `state` is where its generator stood: of the default one, or of the constructor's own (`has_generator`). None for a
    random operation means: where the random operations before it, replayed in order, leave the default one.
    """

    func: Any
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    results: tuple[Address | None, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    is_random: bool = False
    needs_inputs: bool = True  # False: the generator moves on alike whatever the inputs hold
    state: Tensor | None = None
    has_generator: bool = False
    default_dtype: torch.dtype = torch.float32

    @property
    def is_in_stream(self) -> bool:
        """Whether the draws of earlier entries decide what this one draws."""
        return self.is_random and self.state is None


@dataclass(slots=True)
class Log:
    """What replay needs: operations in order, bytes per storage, and storages that no logged operation made."""

    entries: list[Entry] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    outside: dict[int, torch.UntypedStorage] = field(default_factory=dict)


def replay(log: Log, wanted: Mapping[str, Address], seed: int) -> dict[str, Tensor]:
    """Return the values of `wanted`, bit-equal to a real run of the constructor from `seed`.

    Only what `wanted` depends on runs, and random operations without a state of their own before it, in order, on
    memory that is freed at once: the peak is what is wanted plus one tensor. The caller forks the generator and
    disables dispatch modes. Names that share an address share memory.
    """
    entries, sizes, outside = log.entries, log.sizes, log.outside
    kept = {address.key for address in wanted.values()}
    needed = _needed(entries, set(kept))
    last_use = {key: i for i, entry in enumerate(entries) if needed[i] for key in entry.reads | entry.writes}
    last_draw = max((i for i, e in enumerate(entries) if needed[i] and e.is_in_stream), default=-1)
    last_needed = max((i for i, is_needed in enumerate(needed) if is_needed), default=-1)
    storages: dict[int, torch.UntypedStorage] = {}
    scratch = torch.UntypedStorage(0)
    torch.default_generator.manual_seed(seed)
    with torch.no_grad(), _default_dtype():
        for i, entry in enumerate(entries[: last_needed + 1]):
            if needed[i]:
                _run(entry, storages, sizes, outside)
            elif entry.is_in_stream and i < last_draw:
                scratch = draw(entry, scratch, sizes)
            for key in (entry.reads | entry.writes) - kept:
                if last_use.get(key, -1) <= i:
                    storages.pop(key, None)
    for key in kept - storages.keys():
        storages[key] = outside[key].clone() if key in outside else _zeros(sizes[key])
    return {name: address.view(storages[address.key]) for name, address in wanted.items()}


def _needed(entries: Sequence[Entry], wanted: set[int]) -> list[bool]:
    """Return per entry whether something wanted depends on it.

    A random one in the stream that looks at its inputs (multinomial) counts as wanted when a later draw does.
    """
    needed = [False] * len(entries)
    is_drawing = False
    for i in range(len(entries) - 1, -1, -1):
        entry = entries[i]
        looks = is_drawing and entry.is_in_stream and entry.needs_inputs and bool(entry.reads)
        if entry.writes & wanted or looks:
            needed[i] = True
            wanted |= entry.reads | entry.writes
            is_drawing = is_drawing or entry.is_in_stream
    return needed


def draw(entry: Entry, scratch: torch.UntypedStorage, sizes: Mapping[int, int]) -> torch.UntypedStorage:
    """Run an operation for its random numbers alone; return memory to use again.

    One block serves all: freed blocks of many sizes would stay in the allocator.
    """
    written = [sizes[key] for key in entry.writes & entry.reads]
    if written and max(written) > scratch.nbytes():
        scratch = torch.UntypedStorage(max(written))
    _run(entry, dict.fromkeys(entry.writes & entry.reads, scratch), sizes, {})
    return scratch


def _run(
    entry: Entry,
    storages: dict[int, torch.UntypedStorage],
    sizes: Mapping[int, int],
    outside: Mapping[int, torch.UntypedStorage],
) -> None:
    def tensor_at(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return torch.device("cpu")
        if not isinstance(leaf, Address):
            return leaf
        if leaf.key not in storages:
            known = outside.get(leaf.key)
            storages[leaf.key] = _zeros(sizes[leaf.key]) if known is None else known.clone()
        return leaf.view(storages[leaf.key])

    is_leaf = lambda leaf: isinstance(leaf, Address)  # noqa: E731
    args = tree_map(tensor_at, entry.args, is_leaf=is_leaf)
    kwargs = tree_map(tensor_at, entry.kwargs, is_leaf=is_leaf)
    if entry.has_generator:
        kwargs["generator"] = torch.Generator()
        kwargs["generator"].set_state(entry.state)
    elif entry.state is not None:
        torch.default_generator.set_state(entry.state)
    if entry.default_dtype is not torch.get_default_dtype():
        torch.set_default_dtype(entry.default_dtype)
    outputs = [leaf for leaf in tree_leaves(entry.func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    for output, address in zip(outputs, entry.results, strict=True):
        if address is None:
            continue
        if is_uninitialised(entry.func):
            output.zero_()
        same = output.stride() == address.stride and output.storage_offset() == address.offset
        if same and output.untyped_storage().nbytes() == sizes[address.key]:
            storages[address.key] = output.untyped_storage()
        else:
            storages[address.key] = _zeros(sizes[address.key])
            address.view(storages[address.key]).copy_(output)


_EMPTY = ("aten::empty", "aten::new_empty")


def is_uninitialised(func: Any) -> bool:
    """Tell whether an operator returns memory that nobody wrote; it holds zeros here, so that all workers agree."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.name.startswith(_EMPTY)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _zeros(size_bytes: int) -> torch.UntypedStorage:
    return torch.zeros(size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
