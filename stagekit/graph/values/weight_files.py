"""Tensors in safetensors files: which file holds which name, its shape and type, and one tensor at a time.

Decides what kinds of paths hold weights: one file, shards with an index, a Hugging Face directory, a checkpoint of
stagekit.run.checkpoint. Never opens a pickle. Knows nothing of models: graph.values.weights matches names.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stagekit.errors import WeightsError

INDEX_ENDS = ".safetensors.index.json"
MANIFEST = "MANIFEST.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# What trainers leave beside weights: transformers' Trainer and accelerate.
_TRAINER_STATE = ("training_args", "optimizer", "scheduler", "scaler", "sampler", "rng_state", "random_states")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor is stored and what it is; `dtype` in safetensors' words: "F32", "BF16", "I64"."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating point numbers."""
        return self.dtype.startswith(("F", "BF"))

    def read(self) -> Tensor:
        """Return a copy of the tensor; nothing of the file stays mapped. Raises WeightsError for a damaged file."""
        try:
            with safe_open(self.file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(self.key).clone()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _damaged(self.file, error) from error
        return tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """What a path holds: tensors by name, and other names of some of them."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]


def find(path: Path) -> Stored:
    """Return what `path` holds, having read headers only. Raises WeightsError: not there, no weights, damaged, a pickle."""
    here = f"on this node ({socket.gethostname()})"
    try:
        if path.is_dir():
            return _find_in_folder(path)
        if not path.exists():
            raise WeightsError(f"weights: {path} is not there {here}; every node needs it under the same path")
        if path.name.endswith(INDEX_ENDS):
            return _sharded(path)
        if path.suffix == ".safetensors":
            return Stored(path, _in_file(path), {})
    except OSError as error:
        raise WeightsError(f"weights: can't read {path} {here}: {error.strerror or error}") from error
    raise _no_weights(path, [path])


def _find_in_folder(folder: Path) -> Stored:
    if (folder / MANIFEST).exists():
        return _checkpoint(folder)
    for index in (folder / f"model{INDEX_ENDS}", *sorted(folder.glob(f"*{INDEX_ENDS}"))):
        if index.exists():
            return _sharded(index)
    files = [folder / "model.safetensors"]
    if not files[0].exists():
        files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return Stored(folder, _in_file(files[0]), {})
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise WeightsError(
            f"weights: {folder} holds {len(files)} files ({names}, …) and no *{INDEX_ENDS}; name one file"
        )
    steps = sorted(folder.glob(f"step_*/{MANIFEST}"), key=lambda file: _step_of(file.parent))
    if steps:
        raise WeightsError(
            f"weights: {folder} holds {len(steps)} checkpoints; name one, the last is {steps[-1].parent}"
        )
    raise _no_weights(folder, sorted(folder.iterdir()))


def _step_of(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.name.removeprefix("step_").split(".") if part.isdigit())


def _no_weights(path: Path, files: list[Path]) -> WeightsError:
    pickles = _pickled_weights(files)
    if pickles:
        return WeightsError(
            f"weights: {path} holds weights as a pickle ({pickles[0]}), which can run code and is not opened; convert it "
            "once: a transformers model by AutoModel….from_pretrained(folder).save_pretrained(folder), a state dict by "
            'safetensors.torch.save_file(torch.load("…", weights_only=True), "model.safetensors")'
        )
    names = ", ".join(file.name for file in files[:5]) or "nothing"
    return WeightsError(
        f"weights: {path} is no *.safetensors file, index or checkpoint and holds none (there: {names}); "
        "name a safetensors file, a Hugging Face directory, or a checkpoint folder (step_…)"
    )


def _pickled_weights(files: Iterable[Path]) -> list[str]:
    return [file.name for file in files if file.suffix in _PICKLES and not file.name.startswith(_TRAINER_STATE)]


def holds_pickled_weights(files: Iterable[Path]) -> bool:
    """Tell whether one of `files` may be a pickle of weights: none of those that trainers leave besides."""
    return bool(_pickled_weights(files))


def is_lfs_pointer(file: Path) -> bool:
    """Tell whether `file` is the few lines that git-lfs leaves in place of a file it has not fetched. Raises OSError."""
    with file.open("rb") as stream:
        return stream.read(len(_LFS_POINTER)) == _LFS_POINTER


def _in_file(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {}
            for key in opened.keys():  # noqa: SIM118  not a mapping
                part = opened.get_slice(key)
                tensors[key] = StoredTensor(key, file, tuple(part.get_shape()), str(part.get_dtype()))
            return tensors
    except (SafetensorError, RuntimeError) as error:
        raise _damaged(file, error) from error


def _sharded(index: Path) -> Stored:
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"weights: {index} has no weight_map; is it the index of a sharded model?")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        shard = index.parent / name
        if shard.resolve().parent != index.parent.resolve() and not shard.is_symlink():
            raise WeightsError(f"weights: {index} names {name}, which is outside of its folder")
        if not shard.exists():
            raise WeightsError(f"weights: {index.name} names {name}, which is not in {index.parent}; download it again")
        tensors |= _in_file(shard)
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise WeightsError(f"weights: {index.name} names {lost[0]} in {weight_map[lost[0]]}, but the file lacks it")
    return Stored(index.parent, tensors, {})


def _checkpoint(folder: Path) -> Stored:
    manifest = _json(folder / MANIFEST)
    tensors: dict[str, StoredTensor] = {}
    for name, facts in manifest.get("files", {}).items():
        if not name.endswith(".safetensors"):
            continue
        shard = folder / name
        if not shard.exists() or shard.stat().st_size != facts["size_bytes"]:
            raise WeightsError(f"weights: {shard} is missing or damaged; use an earlier checkpoint")
        tensors |= _in_file(shard)
    return Stored(folder, tensors, dict(manifest.get("aliases", ())))


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except ValueError as error:
        raise _damaged(file, error) from error
    if not isinstance(document, dict):
        raise WeightsError(f"weights: {file} is no JSON object")
    return document


def _damaged(file: Path, error: Exception) -> WeightsError:
    if is_lfs_pointer(file):
        return WeightsError(
            f"weights: {file} on {socket.gethostname()} is a git-lfs pointer in place of the weights; "
            f"run `git lfs pull` in {file.parent}"
        )
    return WeightsError(
        f"weights: {file} on {socket.gethostname()} is damaged ({str(error).splitlines()[0]}); copy or download it again"
    )
