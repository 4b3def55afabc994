"""Checkpoints: every rank's share as safetensors under the unsplit model's names, complete or not there at all.

Written to `.tmp/<step>.<fence>/`; rank 0 writes MANIFEST.json last, then one rename makes `step_<n>.<fence>/` appear.
A crash at any line leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from stagekit.errors import UserError

MANIFEST = "MANIFEST.json"


def prove_shared(
    directory: Path, fence: int, rank: int, shard_ranks: Sequence[int], barrier: Callable[[], None]
) -> None:
    """Before training: show that every rank can write `directory` and that the first one sees what they wrote.

    Raises UserError, which otherwise would come after the last step and lose it all.
    """
    probes = directory / ".tmp" / f"probe.{fence}"
    if rank in shard_ranks:
        try:
            probes.mkdir(parents=True, exist_ok=True)
            (probes / str(rank)).touch()
        except OSError as error:
            raise UserError(f"checkpoint.dir {directory} can't be written on this node: {error.strerror}") from error
    barrier()
    if rank == shard_ranks[0]:
        missing = [other for other in shard_ranks if not (probes / str(other)).exists()]
        if missing:
            raise UserError(
                f"checkpoint.dir {directory} is not one folder: rank {rank} does not see what ranks {missing} wrote; "
                "name a path that all nodes share"
            )
        shutil.rmtree(probes)
    barrier()


def save(
    directory: Path,
    state: Mapping[str, Tensor],
    *,
    step: int,
    fence: int,
    rank: int,
    shard_ranks: Sequence[int],
    barrier: Callable[[], None],
    facts: Mapping[str, Any],
) -> Path:
    """Write this rank's `state`, if it is one of `shard_ranks`; called on every rank. Returns the checkpoint's folder.

    `barrier` waits for all ranks. `facts` are kept in the manifest (plan fingerprint, aliases, …). Raises OSError.
    """
    temporary = directory / ".tmp" / f"{step}.{fence}"
    final = directory / f"step_{step}.{fence}"
    temporary.mkdir(parents=True, exist_ok=True)
    if rank in shard_ranks:
        _save_shard(temporary / f"rank_{rank}.safetensors", state)
    barrier()
    if rank == shard_ranks[0]:
        files = {}
        for shard in (temporary / f"rank_{r}.safetensors" for r in shard_ranks):
            if not shard.exists():
                raise UserError(f"{shard} is not there: checkpoint.dir must be one folder that every node sees")
            files[shard.name] = {"sha256": _sha256(shard), "size_bytes": shard.stat().st_size}
        manifest = {"format": 1, "step": step, "fence": fence, "files": files, **facts}
        _write_durably(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(temporary)
        temporary.rename(final)
        _sync_folder(directory)
    barrier()
    return final


def load(folder: Path) -> dict[str, Tensor]:
    """Return the unsplit model's state dict out of a checkpoint folder. Raises UserError for a damaged one."""
    manifest_path = folder / MANIFEST
    if not manifest_path.exists():
        raise UserError(f"{folder} is no checkpoint: it has no {MANIFEST}")
    manifest = json.loads(manifest_path.read_text())
    state: dict[str, Tensor] = {}
    for name, facts in manifest["files"].items():
        shard = folder / name
        if not shard.exists() or _sha256(shard) != facts["sha256"]:
            raise UserError(f"{shard} is missing or damaged; use an earlier checkpoint")
        state.update(load_file(shard))
    for alias, canonical in manifest.get("aliases", ()):
        state.setdefault(alias, state[canonical])
    return state


def _save_shard(path: Path, state: Mapping[str, Tensor]) -> None:
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        value = tensor.detach().cpu().contiguous()
        tensors[name] = value.clone() if value.data_ptr() in seen else value  # safetensors refuses shared storage
        seen.add(value.data_ptr())
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
