"""Numbers that forward brings forward in plain attributes of modules: `self.calls += 1`, a flag, a growing list.

A capture burns in what they were. Those that only count are harmless; whether one decides anything shows when the model
runs with another value of it. graph.capture.selfcheck asks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

Attributes = dict[tuple[str, str], Any]  # values by module path and attribute name

_FAR = 720720 * 1000  # divisible by every number up to 16 and by 1000, beyond any warm-up


def plain_attributes(module: nn.Module) -> Attributes:
    """Return copies of the numbers, flags, texts, and lists and dicts of them, that modules hold as attributes."""
    return {
        (path, name): copy.deepcopy(value)
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if _is_plain(value)
    }


def other_values(before: Attributes, after: Attributes) -> Iterator[Attributes]:
    """Yield other values for all attributes that one forward changed, none if it changed none."""
    changed = [key for key, value in after.items() if key in before and before[key] != value]
    for ahead in (1, 0) if changed else ():
        found = {key: _other(before[key], after[key], ahead) for key in changed}
        if any(found[key] != after[key] for key in changed):
            yield found


def put(module: nn.Module, values: Mapping[tuple[str, str], Any]) -> None:
    """Set the attributes of `module` and its submodules."""
    for (path, name), value in values.items():
        vars(module.get_submodule(path))[name] = value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(_is_plain(item) for item in (value.values() if isinstance(value, dict) else value))
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
