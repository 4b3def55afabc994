"""Tensors that outlive a recorded constructor outside of the module's names: cached tables, lists of tensors.

Nobody replays those by name, and the next build of the class may find them in its cache: they get their values at once.
Decides which tensors these are, by asking the garbage collector. Called by graph.values.build after a recording.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from types import FrameType

import torch
from torch import Tensor, nn

from stagekit.graph.values.recorder import InitRecorder
from stagekit.graph.values.replay import replay


def give_values_to_the_rest(recorder: InitRecorder, named: Mapping[str, Tensor], module: nn.Module) -> None:
    """Make every tensor of the recording real that something beside `module` holds; parameters stay without values."""
    own = {id(tensor) for tensor in named.values()}
    kinds = (Tensor, nn.Parameter)
    loose = [t for t in gc.get_objects() if type(t) in kinds and id(t) not in own and recorder.lacks_values(t)]
    loose += _held_elsewhere(recorder, named, module)
    if not loose:
        return
    with torch.random.fork_rng(devices=[]):
        made = replay(recorder.log, {str(i): recorder.address_of(t) for i, t in enumerate(loose)}, recorder.seed)
    for i, tensor in enumerate(loose):
        if tensor.device.type != "meta":
            tensor.data.copy_(made[str(i)])
            continue
        value = made[str(i)].requires_grad_(tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, nn.Parameter(value) if type(tensor) is nn.Parameter else value)
        except RuntimeError:  # held by autograd alone, as the base of a view: no constructor can reach it
            continue


def _held_elsewhere(recorder: InitRecorder, named: Mapping[str, Tensor], module: nn.Module) -> list[Tensor]:
    """Return buffers and tensor attributes that are also in a cache or a global: they are small beside parameters."""
    tables = {id(t): t for t in named.values() if not isinstance(t, nn.Parameter) and recorder.lacks_values(t)}
    if not tables:
        return []
    known = {id(named), id(tables)}
    for child in module.modules():
        known |= {id(child.__dict__), id(child._buffers)}
    held: list[Tensor] = []
    for holder in gc.get_referrers(*tables.values()):
        if id(holder) in known or isinstance(holder, FrameType):
            continue
        found = {id(t): t for t in gc.get_referents(holder) if id(t) in tables}
        held += [tables.pop(key) for key in found]
    return held
