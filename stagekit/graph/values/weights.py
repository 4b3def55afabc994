"""Start values from files: stored names matched to a model's, and a stage's tensors read one at a time.

`WeightValues` is a ValueSource: what belongs into a state dict comes from the files, cast to the model's type; the rest
(non-persistent buffers, constants) comes from the constructor. Decides what counts as the same name, as transformers
does; refuses whatever is missing, left over or of another shape before anything starts. Files: graph.values.weight_files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from stagekit.errors import WeightsError
from stagekit.graph.values.weight_files import Stored, StoredTensor, find
from stagekit.graph.values.weight_names import JoinedTensor, transformers_names

if TYPE_CHECKING:
    from stagekit.graph.values.build import ValueSource

_SHOWN = 3
# Masks and tables that older transformers versions saved and newer ones make themselves.
_LEFT_OVER = (r"(^|\.)attn\.(masked_)?bias$", r"attention\.(masked_)?bias$", r"position_ids$", r"rotary_emb\.inv_freq$")
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


class WeightValues:
    """Values out of safetensors files; what they lack by right comes from `source`.

    Raises WeightsError where names, shapes or kinds of numbers don't fit `module`, whose tensors may be on meta.
    """

    equals_build = False

    def __init__(self, path: Path, module: nn.Module, source: ValueSource) -> None:
        stored = find(path)
        self._source, self._module = source, module
        self._from_file = match(stored, module)
        self._dtypes = {name: tensor.dtype for name, tensor in module.state_dict(keep_vars=True).items()}
        self.note = f"read from {path}, each stage its own tensors"
        if "whole model" in source.note:
            self.note += f"; other buffers: {source.note}"

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the values of `names`, each read on its own."""
        others = [name for name in names if name not in self._from_file]
        if others:
            self._refuse_views(others)
        values = self._source.take(others) if others else {}
        read = {name: self._from_file[name].read().to(self._dtypes[name]) for name in names if name in self._from_file}
        return {name: read[name] if name in read else values[name] for name in names}

    def _refuse_views(self, names: Iterable[str]) -> None:
        """A view of a parameter would keep the constructor's values."""
        from stagekit.graph.values.build import named_tensors

        known = dict(named_tensors(self._module))
        loaded = {known[n].untyped_storage()._cdata: n for n in self._from_file if n in known}
        for name in names:
            owner = loaded.get(known[name].untyped_storage()._cdata) if name in known else None
            if owner is not None:
                raise WeightsError(
                    f"weights: {name} shares memory with {owner}, which is read from a file; compute it in forward() "
                    "instead of keeping it"
                )


def match(stored: Stored, module: nn.Module) -> dict[str, StoredTensor | JoinedTensor]:
    """Return the stored tensor of each name of `module`'s state dict, tied names under each of theirs."""
    state = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    keys, joined = _renamed(stored, module, state)
    twins = _twins(state)
    found: dict[str, StoredTensor | JoinedTensor] = {}
    for name in state:
        for other in (name, *twins[name]):
            if other in joined or other in keys:
                found[name] = joined[other] if other in joined else stored.tensors[keys[other]]
                break
    _refuse_missing(stored, module, state, found, keys)
    _refuse_left_over(stored, module, state, keys)
    _refuse_misfits(state, found)
    return found


def _twins(state: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(n for n in groups[id(tensor)] if n != name) for name, tensor in state.items()}


def _renamed(
    stored: Stored, module: nn.Module, state: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, JoinedTensor]]:
    """Return stored keys by the model's names, as far as a rule leads from one to the other, and what is joined."""
    converted, joined = transformers_names(stored.tensors, module)
    parts = {part.key for tensor in joined.values() for part, _ in tensor.parts}
    keys = [key for key in stored.tensors if key not in parts]
    wrapper = next((w for w in _WRAPPERS if keys and all(key.startswith(w) for key in keys)), "")
    prefix = getattr(module, "base_model_prefix", "")
    prefix = f"{prefix}." if isinstance(prefix, str) and prefix else ""
    names: dict[str, str] = {}
    for key in keys:
        name = key.removeprefix(wrapper)
        if name not in state:
            name = converted.get(key, name)
        if name not in state and prefix:
            other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
            name = other if other in state else name
        if name in names:
            raise WeightsError(
                f"weights: {stored.path} holds both {names[name]} and {key}, which are one tensor of the model"
            )
        names[name] = key
    for alias, canonical in stored.aliases.items():
        if alias in state and alias not in names and canonical in names:
            names[alias] = names[canonical]
    return names, joined


def _refuse_missing(
    stored: Stored,
    module: nn.Module,
    state: Mapping[str, Tensor],
    found: Mapping[str, StoredTensor | JoinedTensor],
    keys: Mapping[str, str],
) -> None:
    allowed = _patterns(module, "_keys_to_ignore_on_load_missing")
    missing = [n for n in state if n not in found and not any(re.search(p, n) for p in allowed)]
    if missing:
        unused = [key for name, key in keys.items() if name not in state]
        raise WeightsError(
            f"weights: {stored.path} lacks {len(missing)} of the {len(state)} tensors of {type(module).__name__}: "
            f"{_list(missing, unused)}; is it another model, or another class of it?"
        )


def _refuse_left_over(stored: Stored, module: nn.Module, state: Mapping[str, Tensor], keys: Mapping[str, str]) -> None:
    allowed = (*_LEFT_OVER, *_patterns(module, "_keys_to_ignore_on_load_unexpected"))
    made = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    left = [key for name, key in keys.items() if name not in state and name not in made]
    left = [key for key in left if not any(re.search(pattern, key) for pattern in allowed)]
    if left:
        raise WeightsError(
            f"weights: {stored.path} holds {len(left)} tensors that {type(module).__name__} does not have: "
            f"{_list(left, list(state))}; is it another model, or are there fewer layers here?"
        )


def _refuse_misfits(state: Mapping[str, Tensor], found: Mapping[str, StoredTensor | JoinedTensor]) -> None:
    for name, given in found.items():
        wanted = state[name]
        if given.shape != tuple(wanted.shape):
            raise WeightsError(
                f"weights: {given.key} is {list(given.shape)} in {given.file}, but {list(wanted.shape)} in the model; "
                "build the model with the sizes that were saved"
            )
        if given.is_floating != wanted.is_floating_point():
            kind = str(wanted.dtype).removeprefix("torch.")
            raise WeightsError(f"weights: {given.key} is {given.dtype} in {given.file}, but {kind} in the model")


def _patterns(module: nn.Module, attribute: str) -> tuple[str, ...]:
    return tuple(str(pattern) for pattern in getattr(module, attribute, None) or ())


def _list(names: Sequence[str], candidates: Sequence[str]) -> str:
    shown = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, candidates, 1)
        shown.append(f"{name} (close: {near[0]})" if near else name)
    return ", ".join(shown) + (", …" if len(names) > _SHOWN else "")
