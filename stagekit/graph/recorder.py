"""Init recorder: logs what a model's constructor computes, without computing the large part of it.

`InitRecorder` runs under `build_model()`. Tensors above SMALL_NUMEL elements become meta tensors, smaller ones stay
real so that a constructor may look at them. Every operation that writes memory is logged by storage; `replay` turns
the log into values again. Decides what is recorded; graph.build decides when, and what happens if recording fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

SMALL_NUMEL = 4096
_SENTINEL_SEED = 0x5EED_0F_0F  # a user's manual_seed shows as a generator whose initial seed is no longer this one
_ESCAPES = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::item"})
_REFUSED = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})


class NeedsRealBuild(Exception):
    """The constructor does something that a log can't stand for; the text says what."""


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
    """One logged operation. `seed` alone: the constructor called torch.manual_seed(seed) before the next one."""

    func: Any = None
    args: Any = ()
    kwargs: Any = None
    results: tuple[Address | None, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    is_random: bool = False
    needs_inputs: bool = True  # False: the generator moves on alike whatever the inputs hold
    seed: int | None = None


class InitRecorder(TorchDispatchMode):
    """Record a constructor; `entries`, `sizes` and `outside` then hold all that `replay` needs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.sizes: dict[int, int] = {}  # storage key → bytes
        self.outside: dict[int, torch.UntypedStorage] = {}  # values that no logged operation made
        self._keys: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # an address may not be reused while we know it by its address
        self._copied: set[int] = set()
        self._executing = False
        self._tainted: set[int] = set()  # real at record time, but drawn from another random stream than at replay

    def __enter__(self) -> InitRecorder:
        # torch.nn.init skips meta tensors silently (trunc_normal_, orthogonal_, …): while recording, none shows as one.
        torch.Tensor.is_meta = property(lambda tensor: self._executing and _on_meta(tensor))  # type: ignore[assignment]
        # Rejection sampling looks at what it drew: log the whole function as one operation.
        self._truncated = nn.init._no_grad_trunc_normal_
        nn.init._no_grad_trunc_normal_ = self._truncated_normal
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        nn.init._no_grad_trunc_normal_ = self._truncated
        del torch.Tensor.is_meta  # the base class has the real one
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _truncated_normal(self, tensor: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        if generator is not None:
            raise NeedsRealBuild("trunc_normal_ draws from a generator of its own")
        self._note_seed()
        address = self.address_of(tensor)
        key = frozenset({address.key})
        self._tainted |= key
        self.entries.append(
            Entry(self._truncated, (address, *args), kwargs, (None,), key, key, is_random=True, needs_inputs=False)
        )
        if not _on_meta(tensor):
            with _disable_current_modes():
                self._truncated(tensor, *args, **kwargs)
        return tensor

    def begin(self) -> None:
        """Arm the detection of torch.manual_seed inside the constructor; call with the generator forked."""
        torch.default_generator.manual_seed(_SENTINEL_SEED)

    def address_of(self, tensor: Tensor) -> Address:
        """Return where `tensor` lives; an unknown real storage is taken over as a value from outside."""
        storage = tensor.untyped_storage()
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._register(storage)
            if _on_meta(tensor):
                raise NeedsRealBuild("a meta tensor that the constructor did not make")
            self.outside[key] = storage
        return Address(key, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name
        addresses = [self.address_of(tensor) for tensor in inputs]
        keys = frozenset(address.key for address in addresses)
        self._refuse(name, inputs, keys, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        written = self._written(func, args, kwargs)
        logged_args, logged_kwargs = tree_map(self._as_address, args), tree_map(self._as_address, kwargs)
        if is_random:
            self._note_seed()
        self._executing = True
        try:
            result = self._execute(func, args, kwargs, inputs)
        finally:
            self._executing = False
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [self._is_new(tensor) for tensor in outputs]
        if not written and not any(fresh) and not is_random:
            return result  # a view: addresses already say all
        results = tuple(self._fresh_address(t) if new else None for t, new in zip(outputs, fresh, strict=True))
        made = frozenset(address.key for address in results if address is not None)
        writes = made | written
        if is_random or keys & self._tainted or any(_on_meta(t) for t in inputs):
            self._tainted |= writes
        self.entries.append(
            Entry(
                func,
                logged_args,
                logged_kwargs,
                results,
                reads=keys,
                writes=writes,
                is_random=is_random,
                needs_inputs=len(keys) > 1 or not keys <= written,
            )
        )
        is_in_place = bool(written) and isinstance(result, Tensor) and len(results) == 1 and _returns_first(func)
        return args[0] if is_in_place else result

    def _refuse(self, name: str, inputs: list[Tensor], keys: frozenset[int], kwargs: Any) -> None:
        if name in _ESCAPES and (keys & self._tainted or any(_on_meta(t) for t in inputs)):
            raise NeedsRealBuild(f"{name} looks at a value that is not computed while recording")
        if name in _REFUSED:
            raise NeedsRealBuild(f"{name} changes what memory a tensor names")
        if kwargs.get("generator") is not None:
            raise NeedsRealBuild(f"{name} draws from a generator of its own")

    def _written(self, func: Any, args: Any, kwargs: Any) -> frozenset[int]:
        written: set[int] = set()
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= {self.address_of(t).key for t in tree_leaves(value) if isinstance(t, Tensor)}
        for key in written & self.outside.keys() - self._copied:
            self.outside[key] = self.outside[key].clone()
            self._copied.add(key)
        return frozenset(written)

    def _execute(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        has_device = any(argument.name == "device" for argument in func._schema.arguments)
        on_meta = {**kwargs, "device": torch.device("meta")} if has_device else kwargs
        if not inputs:
            shape_only = func(*args, **on_meta) if has_device else func(*args, **kwargs)
            large = any(t.numel() > SMALL_NUMEL for t in tree_leaves(shape_only) if isinstance(t, Tensor))
            return shape_only if large or not has_device else func(*args, **kwargs)
        if not any(_on_meta(t) for t in inputs):
            return func(*args, **kwargs)
        args, on_meta = tree_map(_to_meta, args), tree_map(_to_meta, on_meta)
        return func(*args, **on_meta)

    def _note_seed(self) -> None:
        seed = torch.default_generator.initial_seed()
        if seed != _SENTINEL_SEED:
            self.entries.append(Entry(seed=seed))
            torch.default_generator.manual_seed(_SENTINEL_SEED)

    def _as_address(self, leaf: Any) -> Any:
        return self.address_of(leaf) if isinstance(leaf, Tensor) else leaf

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._keys

    def _fresh_address(self, tensor: Tensor) -> Address:
        self._register(tensor.untyped_storage())
        return self.address_of(tensor)

    def _register(self, storage: torch.UntypedStorage) -> int:
        key = self._keys.get(storage._cdata)
        if key is None:
            key = len(self._alive)
            self._keys[storage._cdata] = key
            self._alive.append(storage)
            self.sizes[key] = storage.nbytes()
        return key


def _returns_first(func: Any) -> bool:
    """Tell whether the operator returns its first argument after writing it."""
    alias = func._schema.returns[0].alias_info
    return alias is not None and bool(alias.is_write)


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or _on_meta(leaf):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def replay(
    entries: list[Entry],
    sizes: dict[int, int],
    outside: dict[int, torch.UntypedStorage],
    wanted: dict[str, Address],
    seed: int,
) -> dict[str, Tensor]:
    """Return the values of `wanted`, bit-equal to a real run of the constructor from `seed`.

    Every random operation runs, in order, on memory that is freed at once unless something wanted depends on it: the
    peak is what is wanted plus one tensor. The caller forks the generator. Names that share an address share memory.
    """
    kept = {address.key for address in wanted.values()}
    needed = _needed(entries, set(kept))
    last_use = {key: i for i, entry in enumerate(entries) if needed[i] for key in entry.reads | entry.writes}
    storages: dict[int, torch.UntypedStorage] = {}
    last_needed = max((i for i, is_needed in enumerate(needed) if is_needed), default=-1)
    scratch = torch.UntypedStorage(0)
    torch.default_generator.manual_seed(seed)
    with torch.no_grad():
        for i, entry in enumerate(entries[: last_needed + 1]):
            if entry.seed is not None:
                torch.default_generator.manual_seed(entry.seed)
            elif needed[i] or entry.is_random:
                if needed[i]:
                    _run(entry, storages, sizes, outside)
                else:
                    scratch = _run_unneeded(entry, scratch, sizes)
                for key in (entry.reads | entry.writes) - kept:
                    if last_use.get(key, -1) <= i:
                        storages.pop(key, None)
    for key in kept - storages.keys():
        storages[key] = outside[key].clone() if key in outside else torch.UntypedStorage(sizes[key])
    return {name: address.view(storages[address.key]) for name, address in wanted.items()}


def _needed(entries: list[Entry], wanted: set[int]) -> list[bool]:
    """Return per entry whether something wanted depends on it; random ones that look at inputs count as wanted."""
    needed = [False] * len(entries)
    last_wanted = max((i for i, e in enumerate(entries) if e.writes & wanted), default=-1)
    for i in range(len(entries) - 1, -1, -1):
        entry = entries[i]
        looks = entry.is_random and entry.needs_inputs and bool(entry.reads) and i <= last_wanted
        if entry.writes & wanted or looks:
            needed[i] = True
            wanted |= entry.reads | entry.writes
    return needed


def _run_unneeded(entry: Entry, scratch: torch.UntypedStorage, sizes: dict[int, int]) -> torch.UntypedStorage:
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
    sizes: dict[int, int],
    outside: dict[int, torch.UntypedStorage],
) -> None:
    def tensor_at(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return torch.device("cpu")
        if not isinstance(leaf, Address):
            return leaf
        if leaf.key not in storages:
            known = outside.get(leaf.key)
            storages[leaf.key] = torch.UntypedStorage(sizes[leaf.key]) if known is None else known.clone()
        return leaf.view(storages[leaf.key])

    is_leaf = lambda leaf: isinstance(leaf, Address)  # noqa: E731
    args = tree_map(tensor_at, entry.args, is_leaf=is_leaf)
    kwargs = tree_map(tensor_at, entry.kwargs, is_leaf=is_leaf)
    outputs = [leaf for leaf in tree_leaves(entry.func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    for output, address in zip(outputs, entry.results, strict=True):
        if address is None:
            continue
        same = output.stride() == address.stride and output.storage_offset() == address.offset
        if same and output.untyped_storage().nbytes() == sizes[address.key]:
            storages[address.key] = output.untyped_storage()
        else:
            storages[address.key] = torch.UntypedStorage(sizes[address.key])
            address.view(storages[address.key]).copy_(output)
