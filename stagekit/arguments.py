"""What a call of `stagekit.pipeline` may be given: each argument's kind and range, told by its name before anything starts.

Only kinds and ranges; whether they fit the model is said by the rooms that use them. Called by stagekit.api.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from stagekit.errors import UserError
from stagekit.graph.buckets.rule import BucketRule
from stagekit.plan.split import Balanced, parse_bytes

_COUNTS = ("stages", "chunks", "stages_per_rank", "replicas")


def check_model(model: Any, args: Any, kwargs: Any) -> None:
    """Raise UserError unless there is a model, or what builds one, and the arguments of one chunk for it."""
    if not (isinstance(model, nn.Module) or callable(model)):
        raise UserError(f"model is {model!r}; give an nn.Module, or a function without arguments that returns one")
    if not isinstance(args, tuple | list):
        raise UserError(f"args is a {type(args).__name__}; give the positional arguments of one chunk as a tuple: (x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UserError(f"kwargs is a {type(kwargs).__name__}; give the keyword arguments of one chunk as a dict")
    if isinstance(model, nn.Module):
        absent = next((name for name, tensor in model.named_parameters() if tensor.is_meta), None)
        if absent is not None:
            raise UserError(
                f"{absent} is on the meta device and has no value; give the function that builds the model, so that "
                "stages make their own values, or weights="
            )


def check_counts_and_kinds(**given: Any) -> None:
    """Raise UserError naming the first of the counts, `seed`, `compile` and `split` that is of the wrong kind."""
    for name in _COUNTS:
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}; give a whole number of at least 1")
    seed = given["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise UserError(f"seed is {seed!r}; give a whole number from 0 to 2**63 - 1")
    if not isinstance(given["compile"], str):
        raise UserError(f'compile is {given["compile"]!r}; name a compiler: "eager", "default", "auto", "inductor", …')
    if not callable(given["loss_fn"]):
        raise UserError(
            f"loss_fn is {given['loss_fn']!r}; give a function (output, target) -> mean loss of a chunk; where the model "
            "computes it: lambda output, target: output.loss"
        )
    split = given["split"]
    is_list = isinstance(split, list | tuple) and all(isinstance(path, str) for path in split)
    if not (isinstance(split, str | Balanced) or is_list):
        raise UserError(
            f'split is {split!r}; give "balanced", "parameters", "layers", "bucket:25MiB", stagekit.Balanced(...) or a '
            "list of module paths"
        )


def bucket_rule(buckets: Any) -> BucketRule | None:
    """Return the rule that {"cap": 25 << 20, "first": "1MiB"} stands for; None, or a cap of 0: one bucket per stage."""
    if buckets is None:
        return None
    if not isinstance(buckets, Mapping) or not buckets.keys() <= {"cap", "first"} or "cap" not in buckets:
        raise UserError(f'buckets is {buckets!r}; give {{"cap": bytes}} or {{"cap": bytes, "first": bytes}}')
    sizes = {name: _bytes(name, value) for name, value in buckets.items()}
    return BucketRule(sizes["cap"], sizes.get("first") or None) if sizes["cap"] else None


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, str):
        return parse_bytes(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value or 0
    raise UserError(f'buckets: {name} is {value!r}; give bytes as a whole number, or a size such as "25MiB"')
