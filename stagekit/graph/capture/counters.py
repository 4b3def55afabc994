"""Numbers that forward brings forward in plain attributes of modules: `self.calls += 1`, a flag, a growing list.

A capture burns in what they were. Those that only count are harmless; whether one decides anything shows when the model
runs with another value of it: a far one, or one for which a comparison that forward makes (`self.calls == 5`) turns out
otherwise, or one before which it ran other operations (graph.capture.later). graph.capture.selfcheck asks.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

Place = tuple[Any, ...]  # the names and keys that lead from the module to a value
Attributes = dict[Place, Any]

_DEPTH = 6  # of objects and containers in each other, below a module
_NAMESPACES = ("types", "argparse", "collections")  # of Python's own, whose objects hold what the user puts there
_MODULE_OWN = ("_parameters", "_buffers", "_modules")
_MOST = 16  # values tried per attribute
_FAR = 720720 * 1000  # divisible by every number up to 16 and by 1000, beyond any warm-up


def plain_attributes(module: nn.Module) -> Attributes:
    """Return copies of the numbers, flags, texts, and lists and dicts of them, that modules and their objects hold."""
    found: Attributes = {}
    seen: set[int] = set()
    for path, child in module.named_modules():
        _collect(child, tuple(path.split(".")) if path else (), found, seen, _DEPTH)
    return found


def _collect(owner: Any, place: Place, found: Attributes, seen: set[int], depth: int) -> None:
    """Add what `owner` holds, and what objects and containers in it hold, each object once."""
    seen.add(id(owner))
    for key, value in _held(owner):
        if _is_plain(value):
            found[(*place, key)] = copy.deepcopy(value)
        elif depth and id(value) not in seen and _may_hold(value):
            _collect(value, (*place, key), found, seen, depth - 1)


def _held(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, nn.Module):
        return [(key, value) for key, value in vars(owner).items() if key not in _MODULE_OWN]
    if isinstance(owner, dict):
        return list(owner.items())
    return list(enumerate(owner)) if isinstance(owner, list) else list(vars(owner).items())


def _may_hold(value: Any) -> bool:
    if isinstance(value, dict | list):
        return True
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType) or callable(value):
        return False
    package = type(value).__module__.partition(".")[0]
    foreign = package == "torch" or (package in sys.stdlib_module_names and package not in _NAMESPACES)
    return hasattr(value, "__dict__") and not foreign


def name_of(place: Place) -> str:
    """Return a place as one would write it after `self.`."""
    return ".".join(str(step) for step in place)


def changed_between(before: Attributes, after: Attributes) -> list[Place]:
    """Return the places whose values differ."""
    return [place for place, value in after.items() if place in before and before[place] != value]


def other_values(before: Attributes, after: Attributes) -> Iterator[Attributes]:
    """Yield other values for all attributes that one forward changed, none if it changed none."""
    changed = changed_between(before, after)
    for ahead in (1, 0) if changed else ():
        found = {key: _other(before[key], after[key], ahead) for key in changed}
        if any(found[key] != after[key] for key in changed):
            yield found


def put(module: nn.Module, values: Mapping[Place, Any]) -> None:
    """Set what `plain_attributes` returned, in `module` or a copy of it; a place that is gone by now is left out."""
    for place, value in values.items():
        with contextlib.suppress(KeyError, IndexError, TypeError):
            owner: Any = module
            for step in place[:-1]:
                owner = _step(owner, step)
            held = owner if isinstance(owner, dict | list) else vars(owner)
            held[place[-1]] = copy.deepcopy(value) if isinstance(value, list | dict | set | deque) else value


def _step(owner: Any, step: Any) -> Any:
    if isinstance(owner, nn.Module) and step in owner._modules:
        return owner._modules[step]
    return owner[step] if isinstance(owner, dict | list) else vars(owner)[step]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(_is_plain(item) for item in value)
    return isinstance(value, bool | int | float | str | None)


def _other(before: Any, after: Any, ahead: int) -> Any:
    """Return a value far from `after`: one that the next `ahead` calls bring to a round number, the flag's opposite."""
    if isinstance(after, bool):
        return not after
    if isinstance(after, int | float) and isinstance(before, int | float):
        return type(after)(_FAR) - ahead * (after - before)
    if isinstance(after, list):
        return after + after[-1:] * 1000
    if isinstance(after, dict):
        was = before if isinstance(before, dict) else {}
        return {
            key: _other(was[key], value, ahead) if was.get(key, value) != value else value
            for key, value in after.items()
        }
    return after


def turning_points(before: Attributes, after: Attributes, run: Callable[[Attributes], None]) -> Iterator[Attributes]:
    """Yield values, ahead of `after`, of each counter for which a comparison of it turns out otherwise.

    `run(values)` calls forward once with those attributes. Seen through +, -, *, // and % by whole numbers.
    """
    for key, value in after.items():
        was = before.get(key)
        if type(value) is not int or type(was) is not int or value == was:
            continue
        turns = _Turns(1 if value > was else -1)
        run({key: _Counter(value, turns)})
        for way in sorted(turns.ways, key=abs)[:_MOST]:
            yield {key: value + way}


class _Turns:
    """By how much a counter must go on, in the direction in which it counts, for comparisons to turn out otherwise."""

    def __init__(self, direction: int) -> None:
        self.direction = direction
        self.ways: set[int] = set()

    def note(self, way: float, period: int) -> None:
        way = way % (period * self.direction) if period else way
        if way == int(way) and way * self.direction > 0:
            self.ways.add(int(way))


class _Counter(int):
    """A number computed from a counter: the counter changes by `per` where it changes by 1, and by `period` where not."""

    turns: _Turns
    per: float
    period: int

    def __new__(cls, value: int, turns: _Turns, per: float = 1, period: int = 0) -> _Counter:
        self = super().__new__(cls, value)
        self.turns, self.per, self.period = turns, per, period
        return self

    def _then(self, value: Any, factor: float = 1, period: int = 0) -> Any:
        if type(value) is not int:  # a float, a tensor, NotImplemented
            return value
        return _Counter(value, self.turns, self.per * factor, period or self.period)

    def _compared(self, other: Any) -> None:
        if isinstance(other, int | float):
            for beside in (-1, 0, 1):
                self.turns.note((other - int(self) + beside) * self.per, self.period)

    def __add__(self, other: Any) -> Any:
        return self._then(super().__add__(other))

    def __radd__(self, other: Any) -> Any:
        return self._then(super().__radd__(other))

    def __sub__(self, other: Any) -> Any:
        return self._then(super().__sub__(other))

    def __rsub__(self, other: Any) -> Any:
        return self._then(super().__rsub__(other), -1)

    def __mul__(self, other: Any) -> Any:
        return self._then(super().__mul__(other), 1 / other if isinstance(other, int) and other else 1)

    def __floordiv__(self, other: Any) -> Any:
        return self._then(super().__floordiv__(other), other if isinstance(other, int) else 1)

    def __mod__(self, other: Any) -> Any:
        return self._then(super().__mod__(other), 1, abs(int(other * self.per)) if isinstance(other, int) else 0)

    def __eq__(self, other: object) -> bool:
        self._compared(other)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        self._compared(other)
        return super().__ne__(other)

    def __lt__(self, other: int) -> bool:
        self._compared(other)
        return super().__lt__(other)

    def __le__(self, other: int) -> bool:
        self._compared(other)
        return super().__le__(other)

    def __gt__(self, other: int) -> bool:
        self._compared(other)
        return super().__gt__(other)

    def __ge__(self, other: int) -> bool:
        self._compared(other)
        return super().__ge__(other)

    def __bool__(self) -> bool:
        self._compared(0)
        return int(self) != 0

    __hash__ = int.__hash__
