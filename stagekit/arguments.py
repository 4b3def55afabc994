"""What a call of `stagekit.pipeline` may be given: each argument's kind and range, told by its name before anything starts.

Only kinds and ranges; whether they fit the model is said by the rooms that use them. Called by stagekit.api.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stagekit.errors import SplitError, UserError
from stagekit.graph.buckets.rule import BucketRule
from stagekit.graph.capture.capture import Captured
from stagekit.graph.capture.precision import FP32, PRECISIONS
from stagekit.graph.capture.specs import Replicate, Split
from stagekit.graph.values.build import INITS
from stagekit.plan.schedules.registry import is_forward_only
from stagekit.plan.split import Balanced, parse_bytes
from stagekit.run.data_parallel import COMPRESSIONS
from stagekit.run.loss import SUM
from stagekit.run.merge import Cat, Mean, Stack, Sum

_COUNTS = ("stages", "chunks", "replicas")


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
        if name == "chunks" and value == "auto":
            raise UserError(
                'chunks is "auto"; give a whole number of at least 1: only a job, whose program knows its batches, leaves '
                "them open"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}; give a whole number of at least 1")
    per_rank = given["stages_per_rank"]
    counts = per_rank if isinstance(per_rank, list | tuple) else (per_rank,)
    if not counts or not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
        raise UserError(
            f"stages_per_rank is {per_rank!r}; give a whole number of at least 1, a list of one such number per rank, or "
            '"auto" with ranks'
        )
    seed = given["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise UserError(f"seed is {seed!r}; give a whole number from 0 to 2**63 - 1")
    if not isinstance(given["compile"], str):
        raise UserError(f'compile is {given["compile"]!r}; name a compiler: "eager", "default", "auto", "inductor", …')
    if not (given["loss_fn"] is None or callable(given["loss_fn"])):
        raise UserError(
            f"loss_fn is {given['loss_fn']!r}; give a function (output, target) -> mean loss of a chunk; where the model "
            "computes it: lambda output, target: output.loss; None runs forward only"
        )
    split = given["split"]
    is_list = isinstance(split, list | tuple) and all(isinstance(path, str) for path in split)
    if not (isinstance(split, str | Balanced) or is_list):
        raise UserError(
            f'split is {split!r}; give "balanced", "parameters", "layers", "bucket:25MiB", stagekit.Balanced(...) or a '
            "list of module paths"
        )


def schedule_name(schedule: Any) -> str | None:
    """Return a schedule, a path as text. Raises UserError for what is none."""
    if schedule is None or isinstance(schedule, str):
        return schedule
    if isinstance(schedule, Path):
        return str(schedule)
    raise UserError(f'schedule is {schedule!r}; give a name such as "1f1b", or the path of a CSV file')


def check_forward(schedule: str, *, loss_fn: Any, loss_weight: Any, recompute: Any) -> None:
    """Raise UserError where `schedule` and what belongs to training alone contradict each other."""
    if not is_forward_only(schedule):
        if loss_fn is None:
            raise UserError(
                f'loss_fn is None, but schedule "{schedule}" has backwards, which begin at a loss; give loss_fn, or to run '
                'forward only leave schedule out or write schedule="forward"'
            )
        return
    if recompute:
        raise UserError(f"recompute is True, but schedule {schedule} has no backward to recompute for; leave it out")
    if loss_fn is None and loss_weight is not None:
        raise UserError("loss_weight weighs the losses of chunks, but loss_fn is None; give loss_fn, or leave it out")


def check_options(
    *, recompute: Any, loss_weight: Any, init: Any, weights: Any, device: Any, precision: Any = FP32
) -> None:
    """Raise UserError naming the first of these that is of the wrong kind."""
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; give {', '.join(map(repr, PRECISIONS))}")
    if not isinstance(recompute, bool):
        raise UserError(f"recompute is {recompute!r}; give True or False")
    if not (loss_weight is None or callable(loss_weight) or loss_weight == SUM):
        raise UserError(
            f'loss_weight is {loss_weight!r}; give a function (target) -> number, None for rows, or "{SUM}" where loss_fn '
            "sums over the rows instead of averaging"
        )
    if not isinstance(init, str) or init not in ("", *INITS):
        raise UserError(f"init is {init!r}; give {' or '.join(map(repr, INITS))}, or leave it out")
    if not (weights is None or isinstance(weights, str | Path)):
        raise UserError(f"weights is {weights!r}; give a path: safetensors, a folder, a checkpoint")
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f'device is {device!r}; give the kind that the stages will run on: "cpu" or "cuda"') from error


def check_specs(args_spec: Any, kwargs_spec: Any, output_spec: Any) -> None:
    """Raise UserError for a spec of another kind than `Split(dim)`, `Replicate()`, `Cat(dim)` and their relatives."""
    if not (args_spec is None or (isinstance(args_spec, Sequence | Mapping) and not isinstance(args_spec, str))):
        raise UserError(
            f"args_spec is {args_spec!r}; give one spec per positional argument as a list: [Split(0), None]"
        )
    if not (kwargs_spec is None or isinstance(kwargs_spec, Mapping)):
        raise UserError(f"kwargs_spec is {kwargs_spec!r}; give specs by keyword: {{'mask': Replicate()}}")
    positional = args_spec.items() if isinstance(args_spec, Mapping) else enumerate(args_spec or ())
    said = [*((f"args_spec[{key!r}]", spec) for key, spec in positional)]
    said += [(f"kwargs_spec[{key!r}]", spec) for key, spec in (kwargs_spec or {}).items()]
    for name, spec in said:
        if not (spec is None or isinstance(spec, Split | Replicate)):
            raise UserError(f"{name} is {_shown(spec)}; give Split(dim), Replicate() or None, which infers it")
    for name, spec in [*said, *(("output_spec", leaf) for leaf in tree_leaves(output_spec))]:
        if isinstance(spec, type) and spec in (Cat, Stack, Sum, Mean):
            raise UserError(f"{name} holds the class {spec.__name__}; make one of it: {spec.__name__}()")
        dim = getattr(spec, "dim", 0) if isinstance(spec, Split | Cat) else 0
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise UserError(f"{name} is {spec!r}; dim is the number of a dimension, 0 for the first")


def _shown(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)


def check_outputs(captured: Captured) -> None:
    """Raise UserError for a model that returns no tensor: there is no loss of that, and nothing to cut."""
    output = next(node for node in captured.graph.nodes if node.op == "output")
    if not any(isinstance(node.meta.get("val"), Tensor) for node in output.all_input_nodes):
        leaves = ", ".join(sorted({type(leaf).__name__ for leaf in tree_leaves(output.args)})) or "nothing"
        raise UserError(
            f"the model returns no tensor ({leaves}); return the tensors that loss_fn(output, target) takes, alone or in a "
            "tuple, dict or dataclass"
        )


def bucket_rule(buckets: Any) -> BucketRule | None:
    """Return the rule that {"cap": 25 << 20, "first": "1MiB"} stands for; None, or a cap of 0: one bucket per stage."""
    if buckets is None:
        return None
    known = isinstance(buckets, Mapping) and bool(buckets) and buckets.keys() <= {"cap", "first", "compress"}
    if not known or ("first" in buckets and "cap" not in buckets):
        raise UserError(
            f'buckets is {buckets!r}; give {{"cap": bytes, "first": bytes, "compress": "bf16"}}, or some of these ("first" with "cap")'
        )
    sizes = {name: _bytes(name, value) for name, value in buckets.items() if name != "compress"}
    cap = sizes.get("cap", 0)
    return BucketRule(cap, sizes.get("first") or None) if cap else None


def compression(buckets: Any) -> str:
    """Return the type that gradients are rounded to before they are summed over replicas; empty: they are not."""
    given = (buckets or {}).get("compress")
    if given not in (None, *COMPRESSIONS):
        raise UserError(f"buckets: compress is {given!r}; give {' or '.join(map(repr, COMPRESSIONS))}, or leave it out")
    return given or ""


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except SplitError as error:
            raise UserError(f"buckets: {name}: {error}") from None
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value or 0
    raise UserError(f'buckets: {name} is {value!r}; give bytes as a whole number, or a size such as "25MiB"')
