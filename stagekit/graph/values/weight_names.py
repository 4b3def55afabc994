"""Names that transformers changes when it loads a model: renamed keys, and tensors that it joins out of several.

Decides nothing itself: asks transformers' own conversion rules, one tensor at a time, so that a stage still reads only
what it owns. Only used for a transformers model, whose package is then there. Called by graph.values.weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stagekit.errors import WeightsError
from stagekit.graph.values.weight_files import StoredTensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True)
class JoinedTensor:
    """A tensor of the model that is stored in parts: one per expert, or query, key and value apart."""

    name: str
    converter: Any
    module: nn.Module
    parts: list[tuple[StoredTensor, str]] = field(default_factory=list)  # with the pattern that matched it

    @property
    def key(self) -> str:
        """The first stored name, for messages."""
        return self.parts[0][0].key

    @property
    def file(self) -> Path:
        """The file of the first part."""
        return self.parts[0][0].file

    @property
    def dtype(self) -> str:
        """Of the first part."""
        return self.parts[0][0].dtype

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating point numbers."""
        return self.parts[0][0].is_floating

    @property
    def shape(self) -> tuple[int, ...]:
        """The joined shape, found without reading values."""
        return tuple(self._joined(lambda p: torch.empty(p.shape, dtype=_DTYPES.get(p.dtype), device="meta")).shape)

    def read(self) -> Tensor:
        """Return the joined tensor; its parts are read and dropped."""
        return self._joined(lambda part: part.read())

    def _joined(self, value: Callable[[StoredTensor], Tensor]) -> Tensor:
        converter = copy.deepcopy(self.converter)
        for part, pattern in self.parts:
            converter.add_tensor(self.name, part.key, pattern, lambda part=part: value(part))
        try:
            results = converter.convert(self.name, model=self.module, config=getattr(self.module, "config", None))
            result = results[self.name]
        except Exception as error:
            raise WeightsError(
                f"weights: {self.name} can't be joined out of {len(self.parts)} stored tensors ({self.key}, …): "
                f"{type(error).__name__}: {error}"
            ) from error
        joined: Tensor = result[0] if isinstance(result, list) else result
        return joined


def transformers_names(
    stored: Mapping[str, StoredTensor], module: nn.Module
) -> tuple[dict[str, str], dict[str, JoinedTensor]]:
    """Return the model's name per stored key, and the joined tensors by their name; both empty for other models."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return {}, {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # versions before 5 change no names
        return {}, {}
    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters: list[Any] = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state = module.state_dict(keep_vars=True)
    prefix = getattr(module, "base_model_prefix", "") or None
    names: dict[str, str] = {}
    joined: dict[str, JoinedTensor] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state:
            continue  # as it is called, or not at all
        if pattern is None:
            names[key] = name
        elif len(by_pattern[pattern].target_patterns) > 1:
            raise WeightsError(
                f"weights: {key} holds several tensors of {type(module).__name__} in one; save the model's own tensors "
                'once: safetensors.torch.save_model(model, "model.safetensors")'
            )
        else:
            part = joined.setdefault(name, JoinedTensor(name, by_pattern[pattern], module))
            part.parts.append((stored[key], pattern))
    return names, joined
