"""Mistakes in a YAML file, and where they are: line and column for every field. Used by pipeapi.jobspec alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the field's path, what is wrong, where (1-based; 0: unknown), what to do."""

    field: str
    message: str
    line: int = 0
    column: int = 0
    hint: str = ""

    def render(self, path: str) -> str:
        """Return the two lines that a user sees."""
        where = f"{path}:{self.line}:{self.column}" if self.line else path
        subject = f"{self.field}: " if self.field else ""
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"error: {subject}{self.message} ({where}){hint}"


class SpecError(ValueError):
    """A job file with mistakes: all of them, in the order of the file."""

    def __init__(self, path: str, problems: Sequence[Problem]) -> None:
        self.path, self.problems = path, tuple(problems)
        super().__init__("\n".join(problem.render(path) for problem in problems))


class StrictLoader(yaml.SafeLoader):
    """SafeLoader that also refuses aliases and duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(
                None, None, "aliases are not allowed in a job file", event.start_mark
            )
        return super().compose_node(parent, index)


def duplicate_keys(node: yaml.Node | None) -> list[Problem]:
    """Return a problem for each key that its mapping has already."""
    problems: list[Problem] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                mark = key.start_mark
                problems.append(Problem(str(key.value), "given twice", mark.line + 1, mark.column + 1))
            seen.add(key.value)
            problems += duplicate_keys(value)
    return problems


def position(node: yaml.Node | None, location: Sequence[Any], *, of_key: bool) -> tuple[int, int]:
    """Find the deepest part of `location` that the document has: its key's mark, or its value's."""
    mark = node.start_mark if node is not None else None
    for depth, part in enumerate(location):
        last = depth == len(location) - 1
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == str(part)), None)
            if found is None:
                break
            node = found[1]
            mark = found[0].start_mark if last and of_key else node.start_mark
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            mark = node.start_mark
        else:
            break
    return (mark.line + 1, mark.column + 1) if mark else (0, 0)
