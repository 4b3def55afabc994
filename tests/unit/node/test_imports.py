"""What each command must not import, proven in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_shim_imports_the_standard_library_alone() -> None:
    loaded = loaded_after("import piped.__main__, piped.shim.main")
    top = {name.partition(".")[0] for name in loaded}
    foreign = top - set(sys.stdlib_module_names) - {"piped", "__main__"}
    at_startup = {name.partition(".")[0] for name in loaded_after("pass")}
    assert foreign - at_startup == set()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [("piped.node.app", "torch"), ("piped.worker.main", "grpc"), ("piped.__main__", "structlog")],
)
def test_a_command_starts_without(module: str, forbidden: str) -> None:
    assert forbidden not in loaded_after(f"import {module}")
