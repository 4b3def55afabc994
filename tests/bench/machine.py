"""Where results go, and what they were measured on. Used by the benchmarks."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def hardware() -> dict[str, Any]:
    """Return the processor, its cores and the load right now."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
    }


def write_results(name: str, machine: dict[str, Any], *, quick: bool, **facts: Any) -> None:
    """Write `results/<date>-<name>.json`: the command, `machine` as it was at the start, versions, and `facts`."""
    date = datetime.date.today().isoformat()
    document = {
        "date": date,
        "command": f"python tests/bench/{name}.py" + (" --quick" if quick else ""),
        "hardware": machine,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **facts,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{date}-{name}.json").write_text(json.dumps(document, indent=1) + "\n")
