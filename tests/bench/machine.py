"""Where results go, and what they were measured on. Used by the benchmarks."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

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
