"""Documents that are generated from code and committed: written anew, or compared with `--check`.

The job file's JSON Schema, and the tables of states in piped.core's README. (Dashboards have a generator of their own in deploy/grafana.)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeapi.jobspec import JobFile
from piped.core import attempts, jobs, nodes

ROOT = Path(__file__).resolve().parent.parent
CORE_README = ROOT / "daemon/piped/core/README.md"


def documents() -> dict[Path, str]:
    """Return what each generated file must hold."""
    schema = json.dumps(JobFile.model_json_schema(), indent=2) + "\n"
    readme = CORE_README.read_text()
    for name, rows in {"job": jobs.NEXT, "attempt": attempts.NEXT, "node": nodes.NEXT}.items():
        head, begin, rest = readme.partition(f"<!-- {name} states -->\n")
        _old, end, tail = rest.partition("\n<!-- end -->")
        readme = f"{head}{begin}{state_table(rows)}{end}{tail}"
    return {ROOT / "proto/pipeapi/job.schema.json": schema, CORE_README: readme}


def state_table(rows: Mapping[Any, frozenset[Any]]) -> str:
    """Return the legal steps as a Markdown table, in the order of their enum."""
    order = list(type(next(iter(rows))))
    lines = ["| from | to |", "|---|---|"]
    for state in order:
        following = ", ".join(each.value for each in order if each in rows[state])
        lines.append(f"| {state.value} | {following or '— (terminal)'} |")
    return "\n".join(lines)


def main() -> int:
    """Write the files; with --check only compare, and return 1 where one differs."""
    stale = [path for path, text in documents().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run python tests/generated.py and commit", file=sys.stderr)
        return 1 if stale else 0
    for path, text in documents().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
