"""One rank of one attempt: what the shim's `assign` line says, in the types that a worker computes with.

Decides the backend and the device of this process. Read by piped.worker.train and piped.worker.score.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank of one attempt, as the shim hands it over."""

    job_id: str
    fence: int
    rank: int
    world_size: int
    device: torch.device
    backend: str
    spec: dict[str, Any]
    data_address: str
    folder: Path  # this rank's own, on the node
    source_dir: str | None

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Assignment:
        """Read the `assign` line."""
        rank, ranks, spec = message["rank"], message["ranks"], message["spec"]
        devices = [entry["device"].partition(":")[0] for entry in ranks]
        all_cuda = all(device == "cuda" for device in devices)
        backend = spec["backend"] if spec["backend"] != "auto" else ("nccl" if all_cuda else "gloo")
        mine = next(entry for entry in ranks if entry["rank"] == rank)
        is_cuda = mine["device"].startswith("cuda")
        folder = Path(message["attempt_dir"]) / "ranks" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(
            message["job_id"],
            message["fence"],
            rank,
            message["world_size"],
            torch.device("cuda", 0) if is_cuda else torch.device("cpu"),  # CUDA_VISIBLE_DEVICES shows one device
            backend,
            spec,
            message["data_address"],
            folder,
            message.get("source_dir"),
        )

    @property
    def start_timeout(self) -> timedelta:
        """How long ranks wait for each other's plan; the coordinator gives the attempt up after as long."""
        return timedelta(seconds=int(self.spec["recovery"]["start_timeout"]))

    @property
    def init(self) -> str:
        """How the constructor draws; empty: as its size says."""
        return "" if self.spec["init"] == "auto" else str(self.spec["init"])

    @property
    def checkpoint_dir(self) -> Path | None:
        """Where weights go; None: nowhere."""
        return Path(self.spec["checkpoint"]["dir"]) if self.spec["checkpoint"] else None

    @property
    def pipeline_rank(self) -> int:
        """Rank within its replica."""
        return self.rank % (self.world_size // int(self.spec["pipeline"]["replicas"]))
