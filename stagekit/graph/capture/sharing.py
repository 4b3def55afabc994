"""Parameters and buffers that are several tensors on the same memory: a stage holds each as a tensor of its own.

Constants may share memory (tables of positions in every layer). What is trained or written in forward may not: the other
tensor would keep the old values, without a word. Called by graph.capture; one tensor under several names is a tied weight
and fine.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn

from stagekit.errors import CaptureError
from stagekit.graph.passes.aliasing import written_inputs
from stagekit.graph.values.build import named_tensors


def written_names(graph: fx.Graph, storages: Mapping[str, int], names: Mapping[str, str]) -> set[str]:
    """Return which parameters and buffers the graph writes; `names`: by placeholder."""
    written = {storages.get(target.name) for node in graph.nodes for target in written_inputs(node)} - {None}
    return {name for placeholder, name in names.items() if storages.get(placeholder) in written}


def check_sharing(module: nn.Module, read: Collection[str], written: Collection[str]) -> None:
    """Refuse two tensors on the same memory where one is trained or written and the other is read or saved."""
    seen = set(read) | set(module.state_dict(keep_vars=True))
    for (one, first), (other, second) in _overlapping(module):
        for name, tensor, reader in ((one, first, other), (other, second, one)):
            changes = "is trained" if isinstance(tensor, nn.Parameter) and tensor.requires_grad else ""
            changes = "is written in forward" if name in written else changes
            if changes and reader in seen:
                raise CaptureError(_words(name, tensor, changes, reader, second if tensor is first else first))


def _words(name: str, tensor: Tensor, changes: str, reader: str, other: Tensor) -> str:
    both = isinstance(tensor, nn.Parameter) and isinstance(other, nn.Parameter)
    return (
        f"{name} and {reader} are different tensors on the same memory, and {name} {changes}: in a pipeline {reader} would "
        f"keep the old values; {'assign the Parameter itself, not its .data, to tie them' if both else 'take the view in forward'}"
        ", or clone() one of them"
    )


def _overlapping(module: nn.Module) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Yield each pair of distinct tensors that share bytes, each under its first name."""
    groups: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in named_tensors(module):
        storage = _storage(tensor)
        if storage is not None and tensor.numel():
            groups.setdefault(storage._cdata, {}).setdefault(id(tensor), (name, tensor))
    for group in groups.values():
        for one, other in itertools.combinations(group.values(), 2):
            (begin, end), (start, stop) = _bytes(one[1]), _bytes(other[1])
            if begin < stop and start < end:
                yield one, other


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
        return None


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Return where in its memory a tensor begins and ends."""
    last = int(sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True)))
    begin = int(tensor.storage_offset())
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()
