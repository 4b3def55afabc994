"""`Run`: this rank's stages of a deployed pipeline, one call per step.

Builds the process groups, agrees on the first step who passes what, freezes the lists and hands them to the executor.
Reads top to bottom: deploy, step, gradients, state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagekit.errors import BugError, PeerError, ShapeError, UserError
from stagekit.plan.actions import Action, Op
from stagekit.plan.contract import ModelSpec
from stagekit.plan.lowering import routes_of
from stagekit.plan.plan import Plan, check_counts, verified_lists
from stagekit.plan.shapes import chunk_sizes, evaluate
from stagekit.run import chunks as chunking
from stagekit.run.agreement import Agreement, Given, Header, agree, exchange_text
from stagekit.run.compiling import compile_stages
from stagekit.run.data_parallel import BucketReducer, GradientSums, TieGroup
from stagekit.run.executor import Executor, Step
from stagekit.run.groups import Groups
from stagekit.run.inputs import InputExchange
from stagekit.run.inputs import Shape as WholeShape
from stagekit.run.layout import TAG_HEADER, ChunkShapes, Placement, torch_dtype
from stagekit.run.loss import LossFunction, LossRunner, LossWeight
from stagekit.run.merge import Rule, merge_outputs
from stagekit.run.stage import StageRunner
from stagekit.run.stats import ActionHook, Recorder
from stagekit.run.transport import settle


class StageSource(Protocol):
    """What a run needs of a captured, cut model (stagekit.graph provides it)."""

    @property
    def spec(self) -> ModelSpec: ...

    def stage_module(self, index: int, *, device: torch.device) -> nn.Module: ...

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]: ...

    def unflatten_output(self, leaves: list[Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is the same for every step."""

    loss_fn: LossFunction
    loss_weight: LossWeight | None  # None: a chunk's rows
    seed: int
    output_rules: tuple[Rule | None, ...] = ()  # per output leaf; empty: the defaults
    compiled: Mapping[int, str] | None = None  # backend per stage that an earlier attempt chose for compile="auto"


class StepResult:
    """What a step gave. Reading `loss` waits for the other ranks' part of it."""

    def __init__(self, run: Run, status: Tensor, work: Any) -> None:
        self._run, self._status, self._work = run, status, work
        self.losses: list[Tensor] = []  # per chunk, on the last rank
        self.weights: list[float] = []
        self._leaves: list[dict[str, Tensor]] = []

    def _settled(self) -> Tensor:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise PeerError(f"exchange of the step's status: {error}") from error
            self._work = None
        return self._status

    @property
    def loss(self) -> float:
        """Weighted mean over chunks and replicas, on every rank."""
        return float(self._settled()[0])

    @property
    def output(self) -> Any:
        """The model's output for the whole batch, on the last rank with `run.keep_output`; elsewhere None."""
        if not self._leaves:
            return None
        spec = self._run.plan.model
        rules = self._run.options.output_rules
        return self._run.source.unflatten_output(merge_outputs(spec.outputs, rules, self._leaves, self.weights))

    def chunk_latencies_s(self) -> tuple[list[float], list[float]]:
        """Return, per chunk of replica 0, its way forward (first stage's start to last stage's end) and back."""
        stamps = self._settled()[1:].view(3, -1) * 1e-9
        return (stamps[1] - stamps[0]).tolist(), (stamps[2] - stamps[1]).tolist()


class Run:
    """This rank's stages. Every method is called on every rank alike, from one thread."""

    def __init__(
        self,
        source: StageSource,
        plan: Plan,
        options: RunOptions,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.source, self.plan, self.device = source, plan, device
        self.options = options
        world = dist.get_world_size(group) if dist.is_initialized() else 1
        check_counts(len(plan.stage_ranks), plan.stages_per_rank, plan.replicas, world)
        self.groups = Groups(plan.num_ranks, plan.replicas, group, device)
        self.rank, self.replica = self.groups.pipeline_rank, self.groups.replica
        self.placement = Placement(plan.model, plan.stage_ranks, self.rank, plan.num_chunks)
        edges = {edge.value: edge for edge in plan.model.edges}
        last = self.placement.last_stage
        self._runners = {
            stage: StageRunner(
                plan.model.stages[stage],
                source.stage_module(stage, device=device),
                edges,
                recompute=plan.recompute and stage != last,  # the last stage's backward follows at once
                defer_weights=stage in plan.halved,
            )
            for stage in self.placement.own_stages
        }
        self.compiled = dict.fromkeys(self._runners, "eager")  # the backend of each of this rank's stages
        if plan.compile != "eager":
            self.compiled |= compile_stages(
                self._runners, plan.model, plan.compile, device, self.groups, options.compiled
            )
        self._sums = self._gradient_sums()
        self._hooks: list[ActionHook] = []
        self._executor: Executor | None = None
        self._agreement = Agreement({}, None)
        self._shapes: dict[tuple[tuple[str, int], ...], ChunkShapes] = {}
        self.step_number = 0
        self.keep_output = True
        self.groups.barrier()
        self.clock_offset_ns = self.groups.measure_clock()
        self.clock_base_ns = self.groups.share_clock_base()

    # ---- steps

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run one training step on a whole batch: gradients are added to `.grad`, the optimizer is the caller's.

        The same call on every rank; a rank that owns none of the arguments calls `step()`. Raises UserError before
        any compute for arguments that don't fit, StageError for what a stage raised, PeerError for a lost neighbour;
        gradients are then as before the step. An error that is caught on one rank does not reach the others, which wait
        for that rank until the group's timeout: let it end the process.
        """
        self.begin_step(*args, target=target, **kwargs)
        with self._undone_on_error():
            self.executor.run_list()
        return self.end_step()

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._sums.abort()
            raise

    def begin_step(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """Agree on the batch and hand it out; then `perform_chunk` or the whole list, then `end_step`."""
        leaves = self._flatten(args, kwargs)
        executor = self._executor or self._prepare(leaves, target)
        header = self._share_header(leaves, target)
        self._begin_inputs(leaves, target, header)
        if self._loss_runner is not None:
            self._loss_runner.begin()
        self._sums.begin()
        executor.begin(self._make_step(header))

    def perform_chunk(self, op: str, stage: int, chunk: int) -> None:
        """Run F or B of one chunk by hand, with the transfers around it (PipelineStage)."""
        with self._undone_on_error():
            self.executor.perform_chunk(op, stage, chunk)

    def end_step(self) -> StepResult:
        """Finish reductions and sends, and share the loss."""
        executor = self.executor
        with self._undone_on_error():
            executor.finish()
        self._sums.end()
        self.step_number += 1
        if self._hooks:
            executor.recorder.replay(self.groups.global_rank, self._hooks)
        return self._result(executor)

    def _flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if not given:
            return [None] * len(self.plan.model.inputs)
        return self.source.flatten_inputs(args, kwargs)

    def _prepare(self, leaves: Sequence[Any], target: Any) -> Executor:
        """First step: agree on ownership, lower again with the input transfers, verify, bind."""
        plan = self.plan
        mine = self._given = Given.of(leaves, target, plan.fingerprint)
        texts = [mine.to_json()]
        if self.groups.pipeline is not None:
            texts = exchange_text(texts[0], self.groups.pipeline, self.groups.comm_device)
        self._agreement = agree(self.placement, [Given.from_json(text) for text in texts], has_loss=True)
        actions = self._lists()[self.rank]
        transport = self.groups.transport()
        self._inputs = InputExchange(
            plan.model, self._agreement.parcels, plan.stage_ranks, self.rank, transport, self.device
        )
        self._loss_runner = self._make_loss_runner() if self.rank == self.placement.last_rank else None
        self._executor = Executor(
            self.placement, actions, self._runners, transport, self._inputs, self._loss_runner, self._sums, self.device
        )
        self._sums.attach(self._executor.recorder)
        return self._executor

    def _lists(self) -> tuple[tuple[Action, ...], ...]:
        plan = self.plan
        routes = routes_of(plan.model, replicas=plan.replicas, inputs=self._agreement.parcels)
        lists, _ = verified_lists(plan.schedule, plan.stage_ranks, plan.num_chunks, routes)
        return lists

    def _make_loss_runner(self) -> LossRunner:
        return LossRunner(
            self.plan.model,
            self._inputs,
            self._agreement.target_tree,
            self.source.unflatten_output,
            self.options.loss_fn,
            self.options.loss_weight,
            self.groups.replicas,
        )

    @property
    def _sent_target_ndims(self) -> tuple[int, ...]:
        """Dimensions of the target's leaves where the target travels from rank 0; empty where it does not."""
        if self._agreement.target is None or not any(p.target for p in self._agreement.parcels.values()):
            return ()
        return self._agreement.target.target_ndims

    def _share_header(self, leaves: Sequence[Any], target: Any) -> Header:
        """Rank 0 reads rows and sizes off its arguments and tells the others."""
        fixed = [symbol for symbol in self.plan.model.symbols if not symbol.is_batch]
        ndims = self._sent_target_ndims
        transport, device = self.groups.transport(), self.groups.comm_device
        if self.rank != 0:
            buffer = torch.empty(Header.length(len(fixed), ndims), dtype=torch.int64, device=device)
            settle(transport.recv([buffer], 0, TAG_HEADER), 0)
            header = Header.unpack(buffer, len(fixed), ndims)
            self._check_given(leaves, target)
            self._check_own(leaves, header)
            return header
        packed = torch.full((Header.length(len(fixed), ndims),), -1, dtype=torch.int64, device=device)  # "refused"
        try:
            header = self._read_header(leaves, target, ndims)
            packed = header.pack(device)
        finally:
            works = [(transport.send([packed], peer, TAG_HEADER), peer) for peer in range(1, self.plan.num_ranks)]
            for work, peer in works:
                settle(work, peer)
        return header

    def _read_header(self, leaves: Sequence[Any], target: Any, ndims: Sequence[int]) -> Header:
        self._check_given(leaves, target)
        spec = self.plan.model
        rows = chunking.batch_rows(spec, leaves)
        if rows is None:
            raise UserError("rank 0 (the first stage) was given no argument that carries the batch")
        sizes = chunk_sizes(rows, self.plan.num_chunks)
        chunking.check_fixed_shapes(spec, leaves, sizes)
        values = chunking.symbol_values(spec, leaves, sizes)[sizes[0]]
        fixed = [symbol for symbol in spec.symbols if not symbol.is_batch]
        missing = [spec.inputs[symbol.graph_input].name for symbol in fixed if symbol.name not in values]
        if missing:
            raise UserError(f"rank 0 (the first stage) must be given {', '.join(missing)}: it decides a size")
        target_sizes: tuple[tuple[int, ...], ...] = ()
        if ndims:
            tensors = [t for t in torch.utils._pytree.tree_leaves(target) if isinstance(t, Tensor)]
            if [t.ndim for t in tensors] != list(ndims):
                raise ShapeError(
                    f"the target has {[t.ndim for t in tensors]} dimensions; at first it had {list(ndims)}"
                )
            target_sizes = tuple(tuple(t.shape) for t in tensors)
        return Header(rows, tuple(values[symbol.name] for symbol in fixed), target_sizes)

    def _check_given(self, leaves: Sequence[Any], target: Any) -> None:
        """Refuse a step that lacks what this rank passed on the first one."""
        pairs = zip(self.plan.model.inputs, self._given.inputs, leaves, strict=True)
        missing = [declared.name for declared, given, leaf in pairs if given and not isinstance(leaf, Tensor)]
        if self._given.target_tree is not None and target is None:
            missing.append("target")
        if missing:
            raise UserError(
                f"rank {self.rank} passed {', '.join(missing)} on the first step but not on step {self.step_number}; "
                "who passes what is agreed once: pass the same on every step"
            )

    def _check_own(self, leaves: Sequence[Any], header: Header) -> None:
        rows = chunking.batch_rows(self.plan.model, leaves)
        if rows is not None and rows != header.rows:
            raise ShapeError(f"rank {self.rank} was given {rows} rows, rank 0 {header.rows}; pass the same batch")
        chunking.check_fixed_shapes(self.plan.model, leaves, chunk_sizes(header.rows, self.plan.num_chunks))

    def _make_step(self, header: Header) -> Step:
        sizes = chunk_sizes(header.rows, self.plan.num_chunks)
        symbols = self.plan.model.symbols
        fixed = dict(zip([s.name for s in symbols if not s.is_batch], header.symbols, strict=True))
        shapes = {}
        for size in set(sizes):
            values = fixed | {s.name: size for s in symbols if s.is_batch}
            key = tuple(sorted(values.items()))
            if key not in self._shapes:
                self._shapes[key] = ChunkShapes(self.plan.model, values)
            shapes[size] = self._shapes[key]
        seed = self.options.seed
        return Step(self.step_number, seed, self.replica, sizes, shapes, keep_output=self.keep_output)

    def _begin_inputs(self, leaves: Sequence[Any], target: Any, header: Header) -> None:
        spec, agreed = self.plan.model, self._agreement.target
        values = {s.name: header.rows for s in spec.symbols if s.is_batch}
        values |= dict(zip([s.name for s in spec.symbols if not s.is_batch], header.symbols, strict=True))
        shapes: list[WholeShape] = []
        for declared in spec.inputs:
            if declared.tensor is None:
                shapes.append(((), torch.float32))
                continue
            sizes = [evaluate(dim, values) for dim in declared.tensor.shape]
            if declared.split_dim is not None:
                sizes[declared.split_dim] = header.rows
            shapes.append((tuple(sizes), torch_dtype(declared.tensor.dtype)))
        dtypes = [torch_dtype(name) for name in agreed.target_dtypes] if agreed else []
        target_shapes: list[WholeShape] = list(zip(header.target_sizes, dtypes, strict=False))
        leaves_of_target = torch.utils._pytree.tree_leaves(target) if target is not None else [None] * len(dtypes)
        self._inputs.begin(leaves, leaves_of_target, shapes, target_shapes)

    def _result(self, executor: Executor) -> StepResult:
        """Post the exchange that carries the loss and chunk times to every rank; StepResult waits for it."""
        runner = self._loss_runner
        flat = [0.0] * (1 + 3 * self.plan.num_chunks)
        if runner is not None:
            flat[0] = runner.result()
        if self.replica == 0:
            self._stamp(executor.recorder, flat)
        status = torch.tensor(flat, dtype=torch.float64, device=self.groups.comm_device)
        result = StepResult(self, status, self.groups.sum_over_world(status))
        if runner is not None:
            result.losses, result.weights, result._leaves = runner.losses, runner.weights, executor.outputs()
        return result

    def _stamp(self, recorder: Recorder, flat: list[float]) -> None:
        """Write first stage's forward start, last stage's forward end, first stage's backward end, per chunk."""
        base, chunks, last = self.clock_base_ns + self.clock_offset_ns, self.plan.num_chunks, self.placement.last_stage
        for index, action in enumerate(recorder.actions):
            if action.op is Op.F:
                if action.stage == 0:
                    flat[1 + action.chunk] = recorder.start_ns[index] - base
                if action.stage == last:
                    flat[1 + chunks + action.chunk] = recorder.end_ns[index] - base
            elif action.op in (Op.B, Op.I) and action.stage == 0:
                flat[1 + 2 * chunks + action.chunk] = recorder.end_ns[index] - base

    # ---- gradients and state

    def _gradient_sums(self) -> GradientSums:
        parameters = {stage: dict(runner.module.named_parameters()) for stage, runner in self._runners.items()}
        reducers = {}
        if self.groups.replicas is not None:
            reducers = {
                stage: BucketReducer(runner.spec, parameters[stage], self.groups.replicas)
                for stage, runner in self._runners.items()
                if runner.spec.buckets
            }
        ties = {}
        for number, stages in enumerate(routes_of(self.plan.model).ties):
            ranks = sorted({self.plan.stage_ranks[stage] for stage in stages})
            group = self.groups.subgroup(ranks)
            if self.rank in ranks:
                names = tied_names(self.plan.model, stages)
                copies = [[parameters[s][name] for s in stages if s in parameters] for name in names]
                ties[number] = TieGroup(copies, group)
        everything = [p for by_name in parameters.values() for p in by_name.values() if p.requires_grad]
        return GradientSums(reducers, ties, everything)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under the unsplit model's names."""
        for runner in self._runners.values():
            yield from runner.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers; the union over ranks loads into the unsplit model, strict."""
        state: dict[str, Tensor] = {}
        for runner in self._runners.values():
            state.update(runner.module.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's share out of a state dict of the unsplit model. Raises UserError for a missing name."""
        for runner in self._runners.values():
            own = runner.module.state_dict()
            missing = [name for name in own if name not in state]
            if missing:
                raise UserError(f"the state dict lacks {missing[:5]} of stage {runner.spec.index}")
            runner.module.load_state_dict({name: state[name] for name in own})

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before.

        The norm is summed in float64 per parameter, a tied one once, in an order that no cut changes.
        """
        names = [p.name for stage in self.plan.model.stages for p in stage.parameters]
        order = {name: index for index, name in enumerate(sorted(set(names)))}
        holder = {p.name: stage.index for stage in reversed(self.plan.model.stages) for p in stage.parameters}
        squares = torch.zeros(len(order), dtype=torch.float64)
        for stage, runner in self._runners.items():
            for name, parameter in runner.module.named_parameters():
                if parameter.grad is not None and holder[name] == stage:
                    squares[order[name]] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).cpu() ** 2
        squares = squares.to(self.groups.comm_device)
        if self.groups.pipeline is not None:
            dist.all_reduce(squares, group=self.groups.pipeline)
        norm = float(squares.sum().sqrt())
        scale = max_norm / (norm + 1e-6)
        if scale < 1.0:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return norm

    def zero_grad(self) -> None:
        """Drop this rank's gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def on_action(self, hook: ActionHook) -> Callable[[], None]:
        """Call `hook(rank, stage, chunk, op, t0_ns, t1_ns)` once per action after each step; returns its removal."""
        self._hooks.append(hook)
        return lambda: self._hooks.remove(hook)

    @property
    def executor(self) -> Executor:
        """Timings, counters and buffers; there is none before the first step."""
        if self._executor is None:
            raise BugError("the executor is made by the first step")
        return self._executor

    @property
    def chunk_targets(self) -> list[Any]:
        """The last step's targets by chunk, on the rank of the last stage; elsewhere nothing."""
        return list((self._loss_runner.targets if self._loss_runner else None) or ())

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Stages on this rank."""
        return self.placement.own_stages


def tied_names(spec: ModelSpec, stages: Sequence[int]) -> list[str]:
    """Return the parameters that exactly `stages` hold."""
    holders: dict[str, list[int]] = {}
    for stage in spec.stages:
        for parameter in stage.parameters:
            if parameter.requires_grad and parameter.is_reached:
                holders.setdefault(parameter.name, []).append(stage.index)
    return sorted(name for name, held in holders.items() if tuple(held) == tuple(stages))
