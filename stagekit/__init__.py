"""stagekit: cut a model into pipeline stages and train them. The surface is in api.py; names load lazily (PEP 562)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "pipeline": "stagekit.api",
    "Pipeline": "stagekit.api",
    "PipelineStage": "stagekit.api",
    "Context": "stagekit.api",
    "init": "stagekit.api",
    "GradScaler": "stagekit.run.scaler",
    "Balanced": "stagekit.plan.split",
    "Split": "stagekit.graph.capture.specs",
    "Replicate": "stagekit.graph.capture.specs",
    "Cat": "stagekit.run.merge",
    "Stack": "stagekit.run.merge",
    "Sum": "stagekit.run.merge",
    "Mean": "stagekit.run.merge",
    "Batch": "stagekit.program",
    "Program": "stagekit.program",
    "ProgramDefaults": "stagekit.program",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stagekit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
