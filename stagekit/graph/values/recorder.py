"""Init recorder: logs what a model's constructor computes, without computing the large part of it.

`InitRecorder` runs under `build_model()`. Tensors above SMALL_NUMEL elements become meta tensors that pose as CPU
tensors, smaller ones stay real so that a constructor may look at them. Every operation that writes memory is logged by
storage; graph.values.replay turns the log into values again. Three ways to treat random numbers:

* QUICK draws nothing large: replay draws all of it in order. What it can't tell (values drawn before a look at them,
  a generator set back, generators of the constructor's own) raises NeedsExactDraws.
* EXACT draws everything as the constructor would, on memory that is freed at once, and notes where the generator
  stood: small values are the true ones, and a look at a large one is answered by replaying what it depends on.
* PER_OP seeds each random operation by (seed, its number): the same distributions, and nothing large is drawn.

Decides what is recorded; graph.values.build decides which way, and what happens if recording fails.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from stagekit.graph.values.replay import Address, Entry, Log, is_uninitialised, replay
from stagekit.plan.seeds import mix

SMALL_NUMEL = 4096
OUTSIDE_LIMIT = 32 << 20  # bytes of values from outside that a log may keep; a worker holds them all its life
_REFUSED = frozenset({"aten::resize_", "aten::resize_as_"})
_MADE_FOR_US = frozenset({"aten::scalar_tensor"})  # torch's own constants (x[0] = 1), beside one of our meta tensors
_WRITES_UNSAID = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm"})  # statistics; the schema is silent
_DEVICE = torch._C.TensorBase.device.__get__
_IS_META = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]


class NeedsRealBuild(Exception):
    """The constructor does something that a log can't stand for; the text says what."""


class NeedsExactDraws(Exception):
    """The constructor looks at random values or at the generator; record it again in the EXACT way."""


class Draws(Enum):
    """How random operations are treated; see the module."""

    QUICK = "quick"
    EXACT = "exact"
    PER_OP = "per_op"


class InitRecorder(TorchDispatchMode):
    """Record a constructor; `log` then holds all that `replay` needs. Seeds the default generator: fork it first."""

    def __init__(self, seed: int, draws: Draws = Draws.QUICK) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = Log()
        self.seed, self.draws = seed, draws
        self._keys: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # an address may not be reused while we know it by its address
        self._user_meta: dict[int, torch.UntypedStorage] = {}  # what the constructor itself put on the meta device
        self._written_outside: set[int] = set()
        self._executing = False
        self._stale: set[int] = set()  # QUICK: real here, but not the values that replay will give
        self._num_random = 0
        self._state = torch.empty(0)  # where we left the default generator
        self._scratch = torch.UntypedStorage(0)
        self.stopped: Exception | None = None

    # ---- while it is active, our meta tensors look like CPU tensors

    def __enter__(self) -> InitRecorder:
        tensor: Any = torch.Tensor
        tensor.is_meta = property(lambda t: _IS_META(t) and not self._poses(t))
        tensor.device = property(lambda t: torch.device("cpu") if self._poses(t) else _DEVICE(t))
        tensor.data_ptr = lambda t: t.untyped_storage()._cdata if self._poses(t) else torch._C.TensorBase.data_ptr(t)
        tensor.tolist = lambda t: torch._C.TensorBase.tolist(self._true(t, "tolist"))
        tensor.numpy = lambda t, **options: self._numpy(t, **options)
        # Rejection sampling looks at what it drew: log the whole function as one operation.
        self._truncated = nn.init._no_grad_trunc_normal_
        nn.init._no_grad_trunc_normal_ = self._truncated_normal
        self._start_thread = threading.Thread.start
        threading.Thread.start = self._refuse_thread(threading.get_ident())  # type: ignore[method-assign]
        torch.default_generator.manual_seed(self.seed)
        self._state = torch.default_generator.get_state()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        threading.Thread.start = self._start_thread  # type: ignore[method-assign]
        nn.init._no_grad_trunc_normal_ = self._truncated
        for name in ("is_meta", "device", "data_ptr", "tolist", "numpy"):
            delattr(torch.Tensor, name)  # the base class has the real ones

    def _stop(self, error: Exception) -> Exception:
        """Remember why the log is worth nothing: a constructor may catch what we raise, and go on."""
        self.stopped = self.stopped or error
        return error

    def _poses(self, tensor: Tensor) -> bool:
        if self._executing or not _IS_META(tensor):
            return False
        return tensor.untyped_storage()._cdata not in self._user_meta

    def _numpy(self, tensor: Tensor, **options: Any) -> Any:
        if self._poses(tensor) and self.draws is not Draws.QUICK:
            raise self._stop(NeedsRealBuild("numpy() shares the memory of a large tensor that is not there"))
        return torch._C.TensorBase.numpy(self._true(tensor, "numpy"), **options)

    def _refuse_thread(self, own: int) -> Any:
        start = self._start_thread

        def start_thread(thread: threading.Thread) -> None:
            if threading.get_ident() == own:
                raise self._stop(NeedsRealBuild("it starts threads, which a recorder does not see"))
            start(thread)

        return start_thread

    # ---- logging

    def address_of(self, tensor: Tensor) -> Address:
        """Return where `tensor` lives; an unknown real storage is taken over as a value from outside."""
        storage = tensor.untyped_storage()
        key = self._keys.get(storage._cdata)
        if key is None:
            if _IS_META(tensor):
                raise self._stop(NeedsRealBuild("it uses a meta tensor that holds no value"))
            key = self._register(storage)
            if sum(map(_nbytes, self.log.outside.values())) + storage.nbytes() > OUTSIDE_LIMIT:
                raise self._stop(
                    NeedsRealBuild(f"it takes over values of more than {OUTSIDE_LIMIT >> 20} MiB from outside")
                )
            self.log.outside[key] = storage.clone()
        return Address(key, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def is_true(self, tensor: Tensor) -> bool:
        """Tell whether `tensor` holds here what replay will give."""
        return not _IS_META(tensor) and self._keys.get(tensor.untyped_storage()._cdata) not in self._stale

    def lacks_values(self, tensor: Tensor) -> bool:
        """Tell whether `tensor` was made here and does not hold what replay will give."""
        try:
            return tensor.untyped_storage()._cdata in self._keys and not self.is_true(tensor)
        except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own: vmap's, sparse, subclasses
            return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._is_for_meta(func, inputs, kwargs):
            return self._run_for_meta(func, args, kwargs)
        name = func._schema.name
        if name in _MADE_FOR_US:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("device") is None and any(map(self._is_user_meta, inputs)):
            raise self._stop(NeedsRealBuild(f"{name} mixes meta tensors with others"))
        if name in _REFUSED:
            raise self._stop(NeedsRealBuild(f"{name} changes what memory a tensor names"))
        addresses = [self.address_of(tensor) for tensor in inputs if not self._is_user_meta(tensor)]
        keys = frozenset(address.key for address in addresses)
        self._check_outside(keys)
        written = self._written(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random:
            kwargs = self._drop_default_generator(kwargs)
        entry = Entry(
            func,
            tree_map(self._as_address, args),
            {k: v for k, v in tree_map(self._as_address, kwargs).items() if k != "generator" or v is None},
            reads=keys,
            writes=written,
            is_random=is_random,
            needs_inputs=len(keys) > 1 or not keys <= written,
            state=self._before_random(kwargs.get("generator")) if is_random else None,
            has_generator=kwargs.get("generator") is not None,
            default_dtype=torch.get_default_dtype(),
        )
        result = self._execute(func, args, kwargs, inputs, entry)
        return self._note(entry, args, kwargs, result)

    def _note(self, entry: Entry, args: Any, kwargs: Any, result: Any) -> Any:
        """Log the operation unless it made a view alone; return what the constructor gets of it."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [t.untyped_storage()._cdata not in self._keys for t in outputs]
        written = [_written_argument(entry.func, i, args, kwargs) for i in range(len(outputs))]
        fresh = [new and given is None for new, given in zip(fresh, written, strict=True)]
        if entry.is_random:
            self._after_random()
        if entry.writes or any(fresh) or entry.is_random:
            results = tuple(self._fresh_address(t) if new else None for t, new in zip(outputs, fresh, strict=True))
            writes = entry.writes | {address.key for address in results if address is not None}
            if self.draws is Draws.QUICK and (entry.is_random or entry.reads & self._stale or self._any_meta(entry)):
                self._stale |= writes
            self.log.entries.append(replace(entry, results=results, writes=writes))
        if not any(given is not None for given in written):
            return result
        if isinstance(result, Tensor):
            return written[0]
        return tuple(b if b is not None else a for a, b in zip(outputs, written, strict=True))

    def _any_meta(self, entry: Entry) -> bool:
        return any(self._alive[key].device.type == "meta" for key in entry.reads)

    def _truncated_normal(self, tensor: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        if self._is_user_meta(tensor):
            return tensor
        address = self.address_of(tensor)
        key = frozenset({address.key})
        if generator is not None:
            kwargs["generator"] = generator
        kwargs = self._drop_default_generator(kwargs)
        entry = Entry(
            self._truncated,
            (address, *args),
            {k: v for k, v in kwargs.items() if k != "generator"},
            (),
            key,
            key,
            is_random=True,
            needs_inputs=False,
            state=self._before_random(kwargs.get("generator")),
            has_generator=kwargs.get("generator") is not None,
            default_dtype=torch.get_default_dtype(),
        )
        with _disable_current_modes():
            if not _IS_META(tensor):
                self._truncated(tensor, *args, **kwargs)
            elif self._must_draw(entry):
                self._draw(entry, lambda value: self._truncated(value, *args, **kwargs), tensor)
        self._after_random()
        if self.draws is Draws.QUICK:
            self._stale |= key
        self.log.entries.append(replace(entry, results=(None,)))
        return tensor

    def _written(self, func: Any, args: Any, kwargs: Any) -> frozenset[int]:
        written: set[int] = set()
        for position, argument in enumerate(func._schema.arguments):
            if not _is_written(func._schema.name, argument):
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= {self.address_of(t).key for t in tree_leaves(value) if isinstance(t, Tensor)}
        self._written_outside |= written & self.log.outside.keys()
        return frozenset(written)

    def _check_outside(self, keys: frozenset[int]) -> None:
        """A value from outside that changed without us is not what the log says: a numpy array filled again."""
        for key in keys & self.log.outside.keys() - self._written_outside:
            if not _same_bytes(self._alive[key], self.log.outside[key]):
                raise self._stop(NeedsRealBuild("it reads memory that something else than torch operations changed"))

    # ---- executing

    def _execute(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], entry: Entry) -> Any:
        has_device = any(argument.name == "device" for argument in func._schema.arguments)
        self._executing = True
        try:
            if not any(map(_IS_META, inputs)):
                return self._execute_real(func, args, kwargs, inputs, entry, has_device)
            return self._execute_shape_only(func, args, kwargs, inputs, entry, has_device)
        finally:
            self._executing = False

    def _execute_real(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], entry: Entry, has_device: bool
    ) -> Any:
        if self.draws is Draws.QUICK and entry.reads & self._stale and _looks(func):
            raise self._stop(NeedsExactDraws(f"{func._schema.name} looks at a random value"))
        if not inputs and has_device:
            shape_only = func(*args, **{**_without_generator(kwargs), "device": torch.device("meta")})
            if any(t.numel() > SMALL_NUMEL for t in tree_leaves(shape_only) if isinstance(t, Tensor)):
                if self._must_draw(entry):
                    func(*args, **kwargs)
                return shape_only
        result = func(*args, **kwargs)
        if is_uninitialised(func):
            result.zero_()
        return tree_map(self._drop_if_large, result)

    def _drop_if_large(self, leaf: Any) -> Any:
        """Keep no large values that the log can make again."""
        is_new = _is_large(leaf) and leaf.untyped_storage()._cdata not in self._keys
        return _to_meta(leaf) if is_new else leaf

    def _execute_shape_only(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], entry: Entry, has_device: bool
    ) -> Any:
        """Run on meta tensors; on the true values where shapes don't tell, or where a real tensor is written."""
        real_written = any(self._alive[key].device.type != "meta" for key in entry.writes)
        if _looks(func) or (real_written and self.draws is not Draws.QUICK):
            return self._execute_on_values(func, args, kwargs)
        if self._must_draw(entry):
            if entry.needs_inputs or len(inputs) != 1:
                return self._execute_on_values(func, args, kwargs)
            self._draw(entry, lambda value: func(value, *args[1:], **kwargs), inputs[0])
        on_meta = {**_without_generator(kwargs), "device": torch.device("meta")} if has_device else dict(kwargs)
        if "generator" in on_meta:
            on_meta["generator"] = None
        try:
            return func(*tree_map(_to_meta, args), **tree_map(_to_meta, on_meta))
        except (NeedsRealBuild, NeedsExactDraws):
            raise
        except Exception:  # no kernel for shapes alone, or one that refuses: the true values then
            return self._execute_on_values(func, args, kwargs)

    def _execute_on_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run on the true values; large results are dropped again."""
        name = func._schema.name
        args, kwargs = (tree_map(lambda leaf: self._true(leaf, name), part) for part in (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map(lambda leaf: _to_meta(leaf) if _is_large(leaf) else leaf, result)

    def _true(self, leaf: Any, what: str) -> Any:
        """Return `leaf` with the values that the constructor would see."""
        if not isinstance(leaf, Tensor) or self.is_true(leaf) or self._is_user_meta(leaf):
            return leaf
        if self.draws is Draws.QUICK:
            raise self._stop(NeedsExactDraws(f"{what} looks at a value that is not computed while recording"))
        address, was = self.address_of(leaf), self._executing
        state = torch.default_generator.get_state()
        self._executing = True
        try:
            with _disable_current_modes():
                return replay(self.log, {"": address}, self.seed)[""]
        finally:
            self._executing = was
            torch.default_generator.set_state(state)

    # ---- random numbers

    def _drop_default_generator(self, kwargs: Any) -> Any:
        return {**kwargs, "generator": None} if kwargs.get("generator") is torch.default_generator else kwargs

    def _before_random(self, generator: torch.Generator | None) -> Tensor | None:
        """Return the state to note for the next random operation; QUICK only looks whether we are still in order."""
        self._num_random += 1
        if self.draws is Draws.QUICK:
            if generator is not None:
                raise self._stop(NeedsExactDraws("it draws from a generator of its own"))
            self.check_generator()
            return None
        if generator is not None:
            return generator.get_state()
        if self.draws is Draws.PER_OP:
            torch.default_generator.manual_seed(mix(self.seed, self._num_random) & 0xFFFFFFFF)
        return torch.default_generator.get_state()

    def _after_random(self) -> None:
        if self.draws is Draws.QUICK:
            with _disable_current_modes():
                torch.rand(
                    (), device="cpu"
                )  # the state moves on also where nothing was drawn, so that setting it back shows
            self._state = torch.default_generator.get_state()

    def check_generator(self) -> None:
        """Raise NeedsExactDraws (QUICK) if the constructor set the default generator itself."""
        if self.draws is Draws.QUICK and not torch.equal(self._state, torch.default_generator.get_state()):
            raise self._stop(NeedsExactDraws("it sets the state of the default generator"))

    def _must_draw(self, entry: Entry) -> bool:
        return entry.is_random and (self.draws is Draws.EXACT or (self.draws is Draws.PER_OP and entry.has_generator))

    def _draw(self, entry: Entry, run: Any, tensor: Tensor) -> None:
        """Let `run` draw for a large tensor, in memory of its shape that serves all of them."""
        address = self.address_of(tensor)
        size = self.log.sizes[address.key]
        if size > self._scratch.nbytes():
            self._scratch = torch.UntypedStorage(size)
        with torch.no_grad():
            run(address.view(self._scratch))

    # ---- the constructor's own meta tensors

    def _is_user_meta(self, tensor: Tensor) -> bool:
        return _IS_META(tensor) and tensor.untyped_storage()._cdata in self._user_meta

    def _is_for_meta(self, func: Any, inputs: Sequence[Tensor], kwargs: Any) -> bool:
        device = kwargs.get("device")
        if device is not None:
            ours = any(_IS_META(t) and not self._is_user_meta(t) for t in inputs)
            return torch.device(device).type == "meta" and not ours and func._schema.name not in _MADE_FOR_US
        return bool(inputs) and all(map(self._is_user_meta, inputs))

    def _run_for_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._executing = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._executing = False
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _IS_META(leaf):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._keys:
                    self._user_meta.setdefault(storage._cdata, storage)
        return result

    # ---- storages

    def _as_address(self, leaf: Any) -> Any:
        return self.address_of(leaf) if isinstance(leaf, Tensor) and not self._is_user_meta(leaf) else leaf

    def _fresh_address(self, tensor: Tensor) -> Address:
        self._register(tensor.untyped_storage())
        return self.address_of(tensor)

    def _register(self, storage: torch.UntypedStorage) -> int:
        key = self._keys.get(storage._cdata)
        if key is None:
            key = len(self._alive)
            self._keys[storage._cdata] = key
            self._alive.append(storage)
            self.log.sizes[key] = storage.nbytes()
        return key


def _written_argument(func: Any, index: int, args: Any, kwargs: Any) -> Tensor | None:
    """Return the argument that the operator's result number `index` is, for in-place and out= variants."""
    returns = func._schema.returns
    alias = returns[index].alias_info if index < len(returns) else None
    if alias is None or not alias.is_write:
        return None
    for position, argument in enumerate(func._schema.arguments):
        given = argument.alias_info
        if given is not None and given.is_write and given.before_set == alias.before_set:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            return value if isinstance(value, Tensor) else None
    return None


def _is_written(operator: str, argument: Any) -> bool:
    if operator in _WRITES_UNSAID:
        return argument.name in ("running_mean", "running_var")
    return argument.alias_info is not None and bool(argument.alias_info.is_write) and operator != "aten::set_"


def _looks(func: Any) -> bool:
    """Tell whether what comes out (a number, a size) depends on values."""
    if func.tags and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        return True
    return bool(func._schema.returns) and not any("Tensor" in str(r.type) for r in func._schema.returns)


def _without_generator(kwargs: Any) -> dict[str, Any]:
    return {key: None if key == "generator" else value for key, value in kwargs.items()}


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() > SMALL_NUMEL


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or _IS_META(leaf):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _nbytes(storage: torch.UntypedStorage) -> int:
    return storage.nbytes()


def _same_bytes(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    with _disable_current_modes():
        return torch.equal(*(torch.empty(0, dtype=torch.uint8).set_(s) for s in (a, b)))
