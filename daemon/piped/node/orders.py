"""What a rank is started with: argv, environment, assignment (the shapes of piped.lines). Pure.

Called by piped.node.attempt.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from piped.lines import Message, encode
from piped.node.attempt_dir import AttemptDir
from piped.node.model import DesiredAttempt, RankPlacement, Slot


@dataclass(frozen=True, slots=True)
class Place:
    """What every worker of this node has in common."""

    node_id: str
    node_name: str
    data_address: str
    interface: str  # that owns data_address


def start_message(desired: DesiredAttempt, placement: RankPlacement, directory: AttemptDir, place: Place) -> Message:
    """Return the shim's `start` of one rank. Raises ValueError when it is longer than a line may be."""
    message = {"type": "start", "ranks": [order(desired, placement, directory, place)]}
    try:
        encode(message)
    except ValueError as error:
        raise ValueError(
            f"rank {placement.rank} can't be told its assignment: {error}; put large values into a file of the job's "
            "source, or on a path that every node sees"
        ) from None
    return message


def order(desired: DesiredAttempt, placement: RankPlacement, directory: AttemptDir, place: Place) -> Message:
    """Return one element of the shim's `start` message."""
    python = desired.spec.get("python") or sys.executable
    return {
        "rank": placement.rank,
        "argv": [str(python), "-m", "piped", "worker"],
        "env": _environment(desired, placement.slot, place, directory),
        "assign": _assign(desired, placement, directory, place),
        "memory_bytes": (desired.spec.get("resources") or {}).get("memory") or 0,
    }


def _environment(desired: DesiredAttempt, slot: Slot, place: Place, directory: AttemptDir) -> dict[str, str]:
    # A worker sees its own device alone, as cuda:0; a CPU slot sees none.
    ours = {"GLOO_SOCKET_IFNAME": place.interface, "CUDA_VISIBLE_DEVICES": slot.uuid}
    # What one worker compiled serves all others of this node, and later attempts.
    cache = directory.path.parent.parent / "compile-cache"
    return {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache), **desired.env, **ours}


def _assign(desired: DesiredAttempt, placement: RankPlacement, directory: AttemptDir, place: Place) -> dict[str, Any]:
    ranks = [
        {
            "rank": other.rank,
            "replica": other.replica,
            "stages": list(other.stages),
            "node_name": other.node_name,
            "device": other.slot.device,
        }
        for other in desired.ranks
    ]
    return {
        "type": "assign",
        "job_id": desired.job_id,
        "attempt": desired.attempt,
        "fence": desired.fence,
        "rank": placement.rank,
        "world_size": len(desired.ranks),
        "ranks": ranks,
        "spec": dict(desired.spec),
        "data_address": place.data_address,
        "attempt_dir": str(directory.path),
        "source_dir": str(directory.source) if directory.source.exists() else None,
    }
