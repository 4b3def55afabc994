"""What a capture's forward leaves in caches outside of the model: tensors without values, which the next call would take.

A table behind `functools.lru_cache`, in a dict or in a variable of the user's own modules is computed on fake tensors when
forward first asks for it during a capture. graph.capture enters `caches_stay_real`, which takes those out again.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import re
import sys
import types
from collections.abc import Container, Iterator, Sequence
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "stagekit", "pytest"}) - {"__main__"}
_INSTALLED = re.compile("[/\\\\](site|dist)-packages[/\\\\]")
_DICTS = (dict, collections.defaultdict, collections.OrderedDict)  # others may do anything when they are read
_LARGEST = 10_000  # entries of a dict that is looked through
_DEPTH = 2  # dicts in dicts


@contextlib.contextmanager
def caches_stay_real(model: nn.Module) -> Iterator[None]:
    """Put back afterwards what Python's modules held, where they hold fake tensors now.

    Looked through are modules that are not installed packages, and those that define `model`'s classes.
    """
    modules = _modules({type(child).__module__ for child in model.modules()})
    before = {id(held): (held, dict(held)) for held in _dicts(modules)}
    clean = [cache for cache in _lru_caches(modules) if not _is_fake(_results(cache))]
    try:
        yield
    finally:
        for held in list(_dicts(modules)):
            _, old = before.get(id(held), (held, {}))
            for name in [name for name, value in held.items() if _is_fake(value) and not _is_fake(old.get(name))]:
                if name in old:
                    held[name] = old[name]
                else:
                    del held[name]
        for cache in clean:
            if _is_fake(_results(cache)):
                cache.cache_clear()


def _is_fake(value: Any) -> bool:
    if type(value) in (tuple, list):
        return any(type(each) is FakeTensor for each in value)
    return type(value) is FakeTensor


def _modules(used: Container[str]) -> list[dict[str, Any]]:
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LIBRARIES or not isinstance(module, types.ModuleType):
            continue
        if name in used or not _INSTALLED.search(str(vars(module).get("__file__"))):
            found.append(vars(module))
    return found


def _values(modules: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Yield what the modules and the classes and functions in them hold."""
    for module in modules:
        for value in list(module.values()):
            yield value
            if issubclass(type(value), type) and value.__module__ == module.get("__name__"):
                for held in list(vars(value).values()):
                    yield getattr(held, "__func__", held) if isinstance(held, staticmethod | classmethod) else held
            elif type(value) is types.FunctionType:
                yield value.__dict__


def _dicts(modules: Sequence[dict[str, Any]]) -> Iterator[dict[Any, Any]]:
    yield from modules
    for value in _values(modules):
        if type(value) in _DICTS:
            yield from _nested(value, _DEPTH)


def _nested(held: dict[Any, Any], depth: int) -> Iterator[dict[Any, Any]]:
    if len(held) > _LARGEST:
        return
    yield held
    for value in list(held.values()) if depth else ():
        if type(value) in _DICTS:
            yield from _nested(value, depth - 1)


def _lru_caches(modules: Sequence[dict[str, Any]]) -> list[Any]:
    return [value for value in _values(modules) if type(value) is functools._lru_cache_wrapper]


def _results(cache: Any) -> list[Any]:
    """Return what a cache holds, tuples and lists flattened; only the collector sees it."""
    held = gc.get_referents(cache)
    held += gc.get_referents(*[each for each in held if type(each) is dict])
    return [*held, *(part for each in held if type(each) in (tuple, list) for part in each)]
