"""One kind of step on one rank, training or evaluation: who passes what, the header, the inputs, the executor.

The first step agrees who passes which argument, lowers the lists again with the transfers of inputs, verifies and binds
them; every step then shares a header and hands the batch out. A `Run` has one lane to train and one to evaluate, over
the same parameters and groups. Decides nothing about gradients. Called by stagekit.run.runtime only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stagekit.errors import BugError, ShapeError, UserError
from stagekit.plan.actions import Action, Op
from stagekit.plan.contract import ModelSpec
from stagekit.plan.shapes import chunk_sizes, evaluate
from stagekit.run import chunks as chunking
from stagekit.run.agreement import Agreement, Given, Header, agree
from stagekit.run.alarm import Alarm
from stagekit.run.executor import Executor, Reductions, Step
from stagekit.run.groups import Groups
from stagekit.run.inputs import InputExchange
from stagekit.run.inputs import Shape as WholeShape
from stagekit.run.layout import ChunkShapes, Placement, torch_dtype
from stagekit.run.loss import LossFunction, LossRunner, LossWeight, output_weights
from stagekit.run.merge import Rule, merge_outputs
from stagekit.run.opening import Call, Opening, Openings
from stagekit.run.stage import StageRunner
from stagekit.run.stats import Recorder
from stagekit.run.wrapped import Parallelize

_MOST_SHAPES = 64  # remembered, of chunks: lengths of text may differ from step to step


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

    loss_fn: LossFunction | None  # None: forwards alone
    loss_weight: LossWeight | None  # None: a chunk's rows
    seed: int
    output_rules: tuple[Rule | None, ...] = ()  # per output leaf; empty: the defaults
    parallelize: Parallelize | None = None  # what the user makes of each stage's module
    compiled: Mapping[int, str] | None = None  # backend per stage that an earlier attempt chose for compile="auto"


class StepResult:
    """What a step gave."""

    def __init__(self, lane: Lane, status: Tensor) -> None:
        self._lane, self._status = lane, status
        self.losses: list[Tensor] = []  # per chunk, on the last rank
        self.weights: list[float] = []
        self._leaves: list[dict[str, Tensor]] = []
        self._output_weights: list[float] = []

    @property
    def loss(self) -> float:
        """Weighted mean over chunks and replicas, on every rank; nan for a batch scored without target."""
        return float(self._status[0])

    @property
    def output(self) -> Any:
        """The model's output for the whole batch, on the last rank with `run.keep_output`; elsewhere None."""
        if not self._leaves:
            return None
        lane = self._lane
        merged = merge_outputs(lane.source.spec.outputs, lane.options.output_rules, self._leaves, self._output_weights)
        return lane.source.unflatten_output(merged)

    def chunk_latencies_s(self) -> tuple[list[float], list[float]]:
        """Return, per chunk of replica 0, its way forward (first stage's start to last stage's end) and back."""
        stamps = self._status[1:-1].view(3, -1) * 1e-9
        return (stamps[1] - stamps[0]).tolist(), (stamps[2] - stamps[1]).tolist()


@dataclass(frozen=True, slots=True)
class Course:
    """What a lane runs: a cut model, who is where, and each rank's lists once it is agreed who passes what."""

    source: StageSource
    placement: Placement
    fingerprint: str  # equal on ranks that run the same thing
    lists: Callable[[Agreement], tuple[tuple[Action, ...], ...]]
    train: bool


class Lane:
    """Steps of one kind. Every method is called on every rank alike, from one thread."""

    def __init__(
        self,
        course: Course,
        options: RunOptions,
        runners: Mapping[int, StageRunner],
        groups: Groups,
        device: torch.device,
        reductions: Reductions,
        alarm: Alarm | None,
        openings: Openings,
    ) -> None:
        self._openings = openings
        self.source, self.options, self.train = course.source, options, course.train
        self._course, self._placement, self._runners = course, course.placement, runners
        self._groups, self._device, self._reductions, self._alarm = groups, device, reductions, alarm
        self._spec, self._num_chunks = course.source.spec, course.placement.num_chunks
        self._executor: Executor | None = None
        self._agreement = Agreement({}, None)
        self._call = Call.STEP
        self._loss: LossRunner | None = None
        self.is_refused = False  # the step that begins: this rank goes through its list without computing
        self._shapes: dict[tuple[tuple[str, int], ...], ChunkShapes] = {}

    @property
    def is_prepared(self) -> bool:
        """Whether a first step agreed who passes what, on every rank alike."""
        return self._executor is not None

    @property
    def executor(self) -> Executor:
        """Timings, counters and buffers; there is none before the first step."""
        if self._executor is None:
            raise BugError("the executor is made by the first step")
        return self._executor

    @property
    def chunk_targets(self) -> list[Any]:
        """The last step's targets by chunk, on the rank of the last stage; elsewhere nothing."""
        return list((self._loss.targets if self._loss else None) or ())

    # ---- a step

    def begin(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        *,
        opening: Opening,
        keep_output: bool,
        loss_scale: float = 1.0,
        refusal: Exception | None = None,
    ) -> Executor:
        """Agree on the batch and hand it out; the executor is ready to run its list.

        `opening` was heard from the first rank. `refusal`: why this rank can't take part; the list is then gone through
        without computing.
        """
        self._call, number = opening.call, opening.number
        leaves: list[Any] = [None] * len(self._spec.inputs)
        try:
            if refusal is None:
                leaves = self._flatten(args, kwargs)
                target = self._as_on_the_first_step(target)
        except Exception as error:
            refusal = error
        if self._executor is None:
            if self._placement.rank == 0:
                self._openings.tell(opening)
            executor = self._prepare(leaves, target, refusal)
            if self._placement.rank != 0:
                opening = self._openings.receive()
        else:
            executor = self._executor
        header = self._share_header(leaves, target, opening, refusal)
        self.is_refused = header.is_refused
        if self._placement.rank != 0 and not self.is_refused:  # rank 0 checked its own before it made the header
            try:
                self._check_given(leaves, target, number, refusal)
                self._check_own(leaves, target, header)
            except Exception as error:
                self.refuse(error)
        if self.is_refused:
            leaves, target = [None] * len(leaves), None
        self._begin_inputs(leaves, target, header)
        if self._loss is not None:
            self._loss.begin()
            self._loss.scale = loss_scale
        sizes = chunk_sizes(header.rows, self._num_chunks)
        shapes, seed = self._chunk_shapes(sizes, header), self.options.seed
        executor.begin(
            Step(number, seed, self._groups.replica, sizes, shapes, train=self.train, keep_output=keep_output)
        )
        return executor

    def refuse(self, error: Exception) -> None:
        """Go through the list of the step that begins without computing: the others run already, and hear of it."""
        if self._alarm is None:
            raise error
        self._alarm.report(error)
        self.is_refused = True

    def end(self, *, clock_base_ns: int) -> StepResult:
        """Exchange loss, chunk times and whether a rank failed. Raises that rank's StageError, on others RemoteError."""
        executor, loss = self.executor, self._loss
        flat = [0.0] * (2 + 3 * self._num_chunks)
        has_failed = self._alarm is not None and self._alarm.rang
        if has_failed:
            flat[-1] = 1.0
        elif loss is not None:
            flat[0] = loss.result()
        elif self._agreement.target is None and not self.train:
            flat[0] = float("nan")
        if not has_failed:
            executor.read_times()
        if self._groups.replica == 0 and not has_failed:
            self._stamp(executor.recorder, flat, clock_base_ns)
        result = self._share(flat)
        if self._placement.rank == self._placement.last_rank:
            result._leaves = executor.outputs()
            result.weights = result._output_weights = output_weights(loss, executor.step.chunk_sizes)
        if loss is not None:
            result.losses, result.weights = loss.losses, loss.weights
        return result

    def pass_over(self, opening: Opening) -> StepResult:
        """Join what the replicas exchange in a step for which this one has no batch; like `end`."""
        if self._placement.rank == 0:
            self._openings.tell(opening)
        if self._loss is not None:
            self._loss.begin()
            self._loss.abandon()
        has_failed = self._alarm is not None and self._alarm.rang
        return self._share([0.0] * (1 + 3 * self._num_chunks) + [float(has_failed)])

    def _share(self, flat: list[float]) -> StepResult:
        status = torch.tensor(flat, dtype=torch.float64, device=self._groups.comm_device)
        self._groups.sum_over_world(status)
        if self._alarm is not None and status[-1] > 0.0:
            self.executor.abort()
            raise self._alarm.failure()
        return StepResult(self, status)

    def _stamp(self, recorder: Recorder, flat: list[float], base: int) -> None:
        """Write first stage's forward start, last stage's forward end, first stage's backward end, per chunk."""
        chunks, last = self._num_chunks, self._placement.last_stage
        for index, action in enumerate(recorder.actions):
            if action.op is Op.F:
                if action.stage == 0:
                    flat[1 + action.chunk] = recorder.start_ns[index] - base
                if action.stage == last:
                    flat[1 + chunks + action.chunk] = recorder.end_ns[index] - base
            elif action.op in (Op.B, Op.I) and action.stage == 0:
                flat[1 + 2 * chunks + action.chunk] = recorder.end_ns[index] - base

    # ---- the first step

    def _flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if not given:
            return [None] * len(self._spec.inputs)
        return self.source.flatten_inputs(args, kwargs)

    def _prepare(self, leaves: Sequence[Any], target: Any, refusal: Exception | None) -> Executor:
        """Agree on ownership, lower again with the input transfers, verify, bind. What one rank refuses, all raise."""
        rank, groups = self._placement.rank, self._groups
        replicas = self._first_words(leaves, target, refusal)
        losses = {self.train or any(each.target_tree is not None for each in given) for given in replicas}
        if len(losses) > 1:
            raise UserError("one replica was given targets and another none; give all of them targets, or none")
        (has_loss,) = losses
        if has_loss and self.options.loss_fn is None:
            raise UserError(
                "a target was passed, but this pipeline has no loss_fn; leave the target out, or give loss_fn"
            )
        agreements = [agree(self._placement, given, has_loss=has_loss) for given in replicas]
        self._agreement = agreements[groups.replica]
        actions = self._course.lists(self._agreement)[rank]
        transport = groups.transport()
        self._inputs = InputExchange(
            self._spec, self._agreement.parcels, self._placement.stage_ranks, rank, transport, self._device
        )
        if has_loss and rank == self._placement.last_rank:
            self._loss = self._make_loss(self.options.loss_fn)
        self._executor = Executor(
            self._placement,
            actions,
            self._runners,
            transport,
            self._inputs,
            self._loss,
            self._reductions,
            self._device,
            self._alarm,
        )
        return self._executor

    def _first_words(self, leaves: Sequence[Any], target: Any, refusal: Exception | None) -> list[list[Given]]:
        """Return, per replica, what its ranks were given. Raises on every rank of the world where one refuses."""
        text = ""
        try:
            if refusal is None:
                self._given = Given.of(leaves, target, self._course.fingerprint)
                text = self._given.to_json()
        except UserError as error:
            refusal = error
        given = [Given.from_json(each) for each in self._groups.agree(text, refusal)]
        ranks = max(self._placement.stage_ranks) + 1
        return [given[begin : begin + ranks] for begin in range(0, len(given), ranks)]

    def _make_loss(self, loss_fn: LossFunction | None) -> LossRunner:
        assert loss_fn is not None
        return LossRunner(
            self._spec,
            self._inputs,
            self._agreement.target_tree,
            self.source.unflatten_output,
            loss_fn,
            self.options.loss_weight,
            self._groups.replicas,
        )

    # ---- the header

    @property
    def _sent_target_ndims(self) -> tuple[int, ...]:
        """Dimensions of the target's leaves where the target travels from rank 0; empty where it does not."""
        if self._agreement.target is None or not any(p.target for p in self._agreement.parcels.values()):
            return ()
        return self._agreement.target.target_ndims

    def _share_header(self, leaves: Sequence[Any], target: Any, opening: Opening, refusal: Exception | None) -> Header:
        """Rank 0 reads rows and sizes off its arguments and tells the others, also that it refuses them."""
        fixed = [symbol for symbol in self._spec.symbols if not symbol.is_batch]
        ndims = self._sent_target_ndims
        if self._placement.rank != 0:
            header = Header.unpack(opening.header, len(fixed), ndims)
            if header.is_refused and self._alarm is not None:
                self._alarm.rang = True  # before its thread hears it
            return header
        try:
            header = self._read_header(leaves, target, ndims, opening.number, refusal)
        except Exception as error:
            if self._alarm is None:
                raise
            self._alarm.report(error)
            header = Header.refused(self._spec, self._num_chunks, ndims)
        self._openings.tell(dataclasses.replace(opening, is_first=False), header.pack())
        return header

    def _read_header(
        self, leaves: Sequence[Any], target: Any, ndims: Sequence[int], number: int, refusal: Exception | None
    ) -> Header:
        self._check_given(leaves, target, number, refusal)
        spec = self._spec
        rows = chunking.batch_rows(spec, leaves)
        if rows is None:
            raise UserError("rank 0 (the first stage) was given no argument that carries the batch")
        sizes = chunk_sizes(rows, self._num_chunks)
        chunking.check_fixed_shapes(spec, leaves, sizes)
        chunking.check_target(pytree.tree_leaves(target), rows)
        values = chunking.symbol_values(spec, leaves, sizes)[sizes[0]]
        fixed = [symbol for symbol in spec.symbols if not symbol.is_batch]
        missing = [spec.inputs[symbol.graph_input].name for symbol in fixed if symbol.name not in values]
        if missing:
            raise UserError(f"rank 0 (the first stage) must be given {', '.join(missing)}: it decides a size")
        target_sizes: tuple[tuple[int, ...], ...] = ()
        if ndims:
            tensors = [t for t in pytree.tree_leaves(target) if isinstance(t, Tensor)]
            if [t.ndim for t in tensors] != list(ndims):
                raise ShapeError(
                    f"the target has {[t.ndim for t in tensors]} dimensions; at first it had {list(ndims)}"
                )
            target_sizes = tuple(tuple(t.shape) for t in tensors)
        return Header(rows, tuple(values[symbol.name] for symbol in fixed), target_sizes)

    def _check_given(self, leaves: Sequence[Any], target: Any, number: int, refusal: Exception | None) -> None:
        """Refuse a step that lacks what this rank passed on the first one, and one under another mode than the capture's."""
        if refusal is not None:
            raise refusal
        call = self._call.word
        chunking.check_mode(self._device.type, call, train=self.train)
        pairs = zip(self._spec.inputs, self._given.inputs, leaves, strict=True)
        missing = [declared.name for declared, given, leaf in pairs if given and not isinstance(leaf, Tensor)]
        if self._given.target_tree is not None and target is None:
            missing.append("target")
        if target is not None and self._agreement.target is None and self._given.target_tree is None:
            raise UserError(
                f"{self._placement.name} passed a target to {call} at step {number}, but none to the first {call}, so that "
                f"nobody computes a loss; who passes what is agreed once: pass a target to every {call}, or to none"
            )
        self._check_kinds(leaves, target)
        if missing:
            raise UserError(
                f"{self._placement.name} passed {', '.join(missing)} to the first {call}, but not to the one at step {number}; "
                f"who passes what is agreed once: pass the same to every {call}"
            )

    def _as_on_the_first_step(self, target: Any) -> Any:
        """Return a target with the keys of its dicts in the first one's order. Raises UserError for another structure."""
        if self._executor is None or target is None or self._given.target_tree is None:
            return target
        tree = pytree.treespec_loads(self._given.target_tree)
        try:
            return pytree.tree_unflatten(tree.flatten_up_to(target), tree)
        except ValueError as error:
            raise UserError(
                f"the target is built otherwise than that of the first {self._call.word} ({error}); pass the same keys and lengths every time"
            ) from error

    def _check_kinds(self, leaves: Sequence[Any], target: Any) -> None:
        """Refuse a target of other types than the first one's, and an input whose gradient would be torn apart."""
        if target is not None and self._given.target_tree is not None:
            kinds = tuple(
                str(getattr(leaf, "dtype", leaf)).removeprefix("torch.") for leaf in pytree.tree_leaves(target)
            )
            if kinds != self._given.target_dtypes:
                raise UserError(
                    f"the target holds {', '.join(kinds)}, that of the first {self._call.word} held "
                    f"{', '.join(self._given.target_dtypes)}; pass the same types every time"
                )
        for number, leaf in enumerate(leaves):
            if self.train and isinstance(leaf, Tensor) and leaf.requires_grad:
                readers = self._placement.readers_of(number)
                if readers - {self._placement.rank}:
                    raise UserError(
                        f"{self._spec.inputs[number].name} requires grad, but stages on ranks {sorted(readers)} read it, each of "
                        "which would have a part of its gradient; pass it detached, or cut the model where one rank reads it"
                    )

    def _check_own(self, leaves: Sequence[Any], target: Any, header: Header) -> None:
        rows = chunking.batch_rows(self._spec, leaves)
        if rows is not None and rows != header.rows:
            raise ShapeError(
                f"{self._placement.name} was given {rows} rows, {self._placement.name_of(0)} {header.rows}; pass the same batch"
            )
        chunking.check_fixed_shapes(self._spec, leaves, chunk_sizes(header.rows, self._num_chunks))
        chunking.check_target(pytree.tree_leaves(target), header.rows)

    # ---- the batch

    def _chunk_shapes(self, sizes: Sequence[int], header: Header) -> dict[int, ChunkShapes]:
        symbols = self._spec.symbols
        fixed = dict(zip([s.name for s in symbols if not s.is_batch], header.symbols, strict=True))
        shapes = {}
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.clear()
        for size in set(sizes):
            values = fixed | {s.name: size for s in symbols if s.is_batch}
            key = tuple(sorted(values.items()))
            if key not in self._shapes:
                self._shapes[key] = ChunkShapes(self._spec, values)
            shapes[size] = self._shapes[key]
        return shapes

    def _begin_inputs(self, leaves: Sequence[Any], target: Any, header: Header) -> None:
        spec, agreed = self._spec, self._agreement.target
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
        leaves_of_target = pytree.tree_leaves(target) if target is not None else [None] * len(dtypes)
        self._inputs.begin(leaves, leaves_of_target, shapes, target_shapes)
