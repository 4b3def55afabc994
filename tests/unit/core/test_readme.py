"""The README's state tables are those of the code."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import pytest

from piped.core import attempts, jobs, nodes

README = Path(attempts.__file__).with_name("README.md")


def table(rows: Mapping[StrEnum, frozenset[StrEnum]]) -> str:
    """Render legal transitions in the order of their enum."""
    order = list(next(iter(rows)).__class__)
    lines = ["| from | to |", "|---|---|"]
    for state in order:
        following = ", ".join(each.value for each in order if each in rows[state])
        lines.append(f"| {state.value} | {following or '— (terminal)'} |")
    return "\n".join(lines)


@pytest.mark.parametrize("rows", [jobs.NEXT, attempts.NEXT, nodes.NEXT], ids=["job", "attempt", "node"])
def test_the_readme_shows_the_table_of_the_code(rows):
    assert table(rows) in README.read_text(), f"put this into {README.name}:\n{table(rows)}"
