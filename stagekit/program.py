"""What a user writes: a Program describes one job once.

Every worker builds it with the same `params` and calls only what its stages need. Required: `build_model`,
`example_inputs`, `loss`, `optimizer`, `batches`; the rest has defaults in `ProgramDefaults`. A `Scorer`, a program with
`mode = "forward"`, needs no `loss` and no `optimizer`, but `collect`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Batch:
    """One replica's share of one step: the model's arguments, whole (not yet in chunks), and the target."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@runtime_checkable
class Program(Protocol):
    """One job, described once."""

    def build_model(self) -> nn.Module:
        """Return the model with its initial weights; runs under a recorder, so no full weights exist anywhere."""
        ...

    def example_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs of ONE chunk."""
        ...

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss of one chunk, a scalar."""
        ...

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the optimizer of the given parameters: those of one rank's stages, under the model's names."""
        ...

    def batches(self, start_step: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yield batch number `start_step`, the next, …; called on one rank per replica.

        A step takes one; with `train.accumulate: N` it takes N, so that step s begins with batch s × N.
        """
        ...


@runtime_checkable
class Scorer(Protocol):
    """A job that only runs forward, in eval mode: scoring, embedding."""

    mode: str  # "forward"

    def build_model(self) -> nn.Module:
        """As `Program.build_model`."""
        ...

    def example_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs of ONE chunk."""
        ...

    def batches(self, start_step: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yield this replica's batches; the job ends when all replicas' have, or after `train.steps` of them."""
        ...

    def collect(self, outputs: Any) -> None:
        """Take the model's output for the next batch, whole; called on the rank of the last stage of each replica."""
        ...


class ProgramDefaults:
    """What a program need not define. Inherit from it, or define the names yourself."""

    mode = "train"
    chunks = 1  # set by the runtime before `example_inputs`: a replica's rows of one step are cut into that many
    replicas = 1  # set by the runtime before `example_inputs`: the batch is shared by that many
    replica = 0  # set by the runtime of a forward job before `batches` and `collect`: whose batches these are

    def tokens(self, target: Any) -> int:
        """Tokens of a chunk, for tokens/s: elements of the target."""
        return target.numel() if isinstance(target, Tensor) else 0

    # Optional, by presence alone:
    #   loss_weight(self, target) -> float       weight of a chunk's mean loss; rows where it is not defined;
    #       loss_weight = "sum" where loss() sums over the rows
    #   loss(self, output, target) -> Tensor     in a forward job: scores batches that have a target
    #   scheduler(self, optimizer) -> LRScheduler      stepped after each optimizer step
    #   evaluate(self, run, step) -> dict[str, float]      every `train.eval_every` steps on every rank alike: calls
    #       run.eval(...) as often as it likes; its numbers are logged and reach `on_step`
    #   parallelize(self, stage_module, mesh) -> nn.Module      changes each stage where it runs: returns
    #       fully_shard(stage_module, mesh=mesh), or DistributedDataParallel over mesh.get_group(); `mesh` has the stage's
    #       replicas, in one dimension. Sharded stages can't be evaluated with run.eval
    #   weights: Path | None      start weights of the model, where the job file names none; see stagekit.graph.values.weights
    #   on_step(self, step, metrics) -> bool | None    after each step on the last stage of replica 0, with "loss",
    #       "step_s" and "tokens_per_s"; True ends the job after this step: all ranks stop, weights are saved
