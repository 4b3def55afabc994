"""The environment of a worker: the shim's own without what a launcher or a service left in it, then the job's.

Standard library only; called by piped.shim.rank.
"""

from __future__ import annotations

from collections.abc import Mapping

# Left by torchrun, Slurm, MPI or systemd, these would make a library believe that it belongs to another group or service.
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "WATCHDOG_", "LISTEN_", "PIPED_")
_FOREIGN = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NOTIFY_SOCKET"}
    | {"INVOCATION_ID", "JOURNAL_STREAM", "CUDA_VISIBLE_DEVICES", "GRPC_ENABLE_FORK_SUPPORT"}
)


def worker_environment(
    base: Mapping[str, str], job: Mapping[str, str], *, rank: int, descriptor: int, marker: str
) -> dict[str, str]:
    """Return `base` scrubbed, then `job`, then ours.

    PIPED_FD is the worker's end of its channel; PIPED_SHIM and PIPED_RANK mark every descendant, so that a sweep
    finds what a worker left behind.
    """
    env = {k: v for k, v in base.items() if k not in _FOREIGN and not k.startswith(_FOREIGN_PREFIXES)}
    env |= job
    env |= {"PIPED_FD": str(descriptor), "PIPED_SHIM": marker, "PIPED_RANK": str(rank)}
    return env
