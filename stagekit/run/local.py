"""All ranks of one pipeline in one thread: the executors of every rank, walked in the verified order.

Every wait is already satisfied when it comes, so nothing can deadlock and every run is the same. For tests, notebooks
and debuggers; called by stagekit.testing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stagekit.errors import UserError
from stagekit.plan.lowering import routes_of
from stagekit.plan.plan import Plan
from stagekit.plan.shapes import chunk_sizes
from stagekit.run import chunks as chunking
from stagekit.run.compiling import compile_stages
from stagekit.run.data_parallel import GradientSums, TieGroup
from stagekit.run.executor import Executor, Step
from stagekit.run.inputs import InputExchange
from stagekit.run.lane import RunOptions, StageSource
from stagekit.run.layout import ChunkShapes, Placement
from stagekit.run.loss import LossRunner, output_weights
from stagekit.run.merge import merge_outputs
from stagekit.run.runtime import tied_names
from stagekit.run.stage import StageRunner
from stagekit.run.transport import Transport


class LocalRun:
    """The executors of all ranks over one in-process transport."""

    def __init__(
        self, source: StageSource, plan: Plan, options: RunOptions, transport: Callable[[int], Transport]
    ) -> None:
        self._source, self._plan, self._options = source, plan, options
        self._transport = transport
        device = torch.device("cpu")
        edges = {edge.value: edge for edge in plan.model.edges}
        last = len(plan.stage_ranks) - 1
        self._runners = {
            spec.index: StageRunner(
                spec,
                source.stage_module(spec.index, device=device),
                edges,
                recompute=plan.recompute and spec.index != last,
                defer_weights=spec.index in plan.halved,
            )
            for spec in plan.model.stages
        }
        if plan.compile != "eager":
            compile_stages(self._runners, plan.model, plan.compile, device, None, options.compiled)
        everything = [pair for runner in self._runners.values() for pair in runner.module.named_parameters()]
        trained = [pair for pair in everything if pair[1].requires_grad and plan.trains]
        ties = dict(enumerate(TieGroup({}, None) for _ in routes_of(plan.model).ties))  # summed after the walk
        self._sums = GradientSums({}, ties, trained)
        self.step_number = 0

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> tuple[float, Any]:
        """Run one step; return the loss and the merged output."""
        chunking.check_mode("cpu", "run_local()", train=self._plan.trains)
        leaves = self._source.flatten_inputs(args, kwargs)
        rows = chunking.batch_rows(self._plan.model, leaves)
        if rows is None:
            raise UserError("no argument carries the batch")
        step = self._make_step(leaves, rows)
        target_leaves, tree = pytree.tree_flatten(target) if target is not None else ([], None)
        executors = self._executors(leaves, target_leaves, tree)
        self._sums.begin()
        try:
            for executor in executors:
                executor.begin(step)
            for rank, position in self._plan.extension:
                executors[rank].perform(position)
            for executor in executors:
                executor.finish()
            if self._plan.trains:
                self._tie_sums()
        except BaseException:
            self._sums.abort()
            raise
        self._sums.end()
        self.step_number += 1
        loss = self._loss
        weights = output_weights(loss, step.chunk_sizes)
        output = merge_outputs(self._plan.model.outputs, self._options.output_rules, executors[0].outputs(), weights)
        return float("nan") if loss is None else loss.result(), self._source.unflatten_output(output)

    def _make_step(self, leaves: Sequence[Any], rows: int) -> Step:
        spec = self._plan.model
        sizes = chunk_sizes(rows, self._plan.num_chunks)
        chunking.check_fixed_shapes(spec, leaves, sizes)
        symbols = chunking.symbol_values(spec, leaves, sizes)
        shapes = {size: ChunkShapes(spec, values) for size, values in symbols.items()}
        return Step(self.step_number, self._options.seed, 0, sizes, shapes, train=self._plan.trains, keep_output=True)

    def _executors(self, leaves: Sequence[Any], target: Sequence[Tensor], tree: Any) -> list[Executor]:
        plan, device, options = self._plan, torch.device("cpu"), self._options
        has_loss = plan.trains or tree is not None
        if has_loss and options.loss_fn is None:
            raise UserError(
                "a target was passed, but this pipeline has no loss_fn; leave the target out, or give loss_fn"
            )
        self._loss: LossRunner | None = None
        executors = []
        for rank in range(plan.num_ranks):
            placement = Placement(plan.model, plan.stage_ranks, rank, plan.num_chunks)
            transport = self._transport(rank)
            inputs = InputExchange(plan.model, {}, plan.stage_ranks, rank, transport, device)
            inputs.begin(leaves, target, [], [])
            loss = None
            if rank == placement.last_rank and has_loss:
                assert options.loss_fn is not None
                unflatten = self._source.unflatten_output
                loss = self._loss = LossRunner(
                    plan.model, inputs, tree, unflatten, options.loss_fn, options.loss_weight, None
                )
            runners = {stage: self._runners[stage] for stage in placement.own_stages}
            sums = _NoSums({}, {}, [])
            executors.append(Executor(placement, plan.actions[rank], runners, transport, inputs, loss, sums, device))
        return executors

    def _tie_sums(self) -> None:
        for stages in routes_of(self._plan.model).ties:
            modules = {stage: dict(self._runners[stage].module.named_parameters()) for stage in stages}
            names = tied_names(self._plan.model, stages)
            TieGroup({name: [modules[stage][name] for stage in stages] for name in names}, None).finish()

    def _named(self, of: Callable[[nn.Module], Any]) -> dict[str, Any]:
        return {name: value for runner in self._runners.values() for name, value in of(runner.module)}

    def gradients(self) -> dict[str, Tensor | None]:
        """Return every parameter's gradient by its name in the unsplit model."""
        return {name: p.grad for name, p in self._named(lambda module: module.named_parameters()).items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return every buffer by its name in the unsplit model."""
        return self._named(lambda module: module.named_buffers())


class _NoSums(GradientSums):
    """Ties are summed after the walk, when every rank's gradients exist."""

    def tie_sum(self, group: int, *, is_drained: bool = False) -> None:
        """Nothing yet."""
