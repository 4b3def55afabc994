"""Documents that are generated from code and committed: written anew, or compared with `--check`.

The job file's JSON Schema. (Dashboards have a generator of their own in deploy/grafana.)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipeapi.jobspec import JobFile

ROOT = Path(__file__).resolve().parent.parent


def documents() -> dict[Path, str]:
    """Return what each generated file must hold."""
    schema = json.dumps(JobFile.model_json_schema(), indent=2) + "\n"
    return {ROOT / "proto/pipeapi/job.schema.json": schema}


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
