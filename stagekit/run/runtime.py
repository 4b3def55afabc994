"""`Run`: this rank's stages of a deployed pipeline, one call per step.

Builds the process groups and the stages, and has one lane to train and one to evaluate (stagekit.run.lane): what a
step is, is theirs. Reads top to bottom: deploy, step, evaluate, gradients, state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagekit.errors import BugError, UserError
from stagekit.plan.actions import Action
from stagekit.plan.contract import ModelSpec
from stagekit.plan.lowering import routes_of
from stagekit.plan.plan import Plan, check_counts, verified_lists
from stagekit.plan.schedules.registry import FORWARD
from stagekit.run.agreement import Agreement
from stagekit.run.compiling import compile_stages
from stagekit.run.data_parallel import BucketReducer, GradientSums, Reducer, TieGroup, like, whole
from stagekit.run.executor import Executor
from stagekit.run.groups import Groups
from stagekit.run.lane import Course, Lane, RunOptions, StageSource, StepResult
from stagekit.run.layout import Placement
from stagekit.run.norm import squares_of, zero_squares
from stagekit.run.opening import Call, Opening, Openings
from stagekit.run.stage import StageRunner, written_states
from stagekit.run.stats import ActionHook, Recorder
from stagekit.run.synced import Meetings, SyncedStageRunner, synced_channels
from stagekit.run.wrapped import WholeCopy, is_sharded, parallelized, reducer_of


class EvaluationSource(StageSource, Protocol):
    """The model in eval mode, cut so that each stage reads only what the training stage of its number owns."""

    def shared_module(self, index: int, owner: nn.Module) -> nn.Module: ...


@runtime_checkable
class Evaluates(Protocol):
    """A source that knows its model in eval mode too."""

    def evaluation(self) -> EvaluationSource: ...


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
        self._trains = plan.trains  # asked once: it goes through the lists
        self.options = options
        world = dist.get_world_size(group) if dist.is_initialized() else 1
        check_counts(len(plan.stage_ranks), plan.stages_per_rank, plan.replicas, world)
        self.groups = Groups(plan.num_ranks, plan.replicas, group, device)
        self.rank, self.replica = self.groups.pipeline_rank, self.groups.replica
        replica = self.replica if plan.replicas > 1 else None
        self.placement = Placement(plan.model, plan.stage_ranks, self.rank, plan.num_chunks, replica)
        self._parallelized: dict[int, nn.Module] = {}  # what the user's `parallelize` returned
        self._runners: dict[int, StageRunner] = {}
        self._build_stages()
        self.compiled = dict.fromkeys(self._runners, "eager")  # the backend of each of this rank's stages
        if plan.compile != "eager":
            self.compiled |= compile_stages(
                self._runners, plan.model, plan.compile, device, self.groups, options.compiled
            )
        self._synchronise_norms()
        self._sums = self._gradient_sums()
        self._written = [state for runner in self._runners.values() for state in written_states(runner.module)]
        self._states: list[tuple[Tensor, Tensor]] = []  # those, as the step found them
        self._hooks: list[ActionHook] = []
        course = Course(source, self.placement, plan.fingerprint, self._lists, train=self._trains)
        self._alarm = self.groups.alarm()
        self._openings = Openings(self.groups, plan.num_ranks)
        self._lane = Lane(course, options, self._runners, self.groups, device, self._sums, self._alarm, self._openings)
        self._evaluation: Lane | None = None
        self._whole_copies: list[WholeCopy] = []  # of sharded stages, to evaluate on
        self.step_number = 0
        self._is_closed = False
        self.keep_output = True
        self.loss_scale = 1.0  # gradients come multiplied by it, see stagekit.GradScaler
        self.groups.barrier()
        self.clock_offset_ns = self.groups.measure_clock()
        self.clock_base_ns = self.groups.share_clock_base()

    def _build_stages(self) -> None:
        """Make the modules of this rank's stages. What one rank raises, all raise."""
        plan, problem = self.plan, None
        edges = {edge.value: edge for edge in plan.model.edges}
        try:
            for stage in self.placement.own_stages:
                module = self.source.stage_module(stage, device=self.device)
                if self.options.parallelize is not None:
                    self._parallelized[stage] = parallelized(self.options.parallelize, module, self.groups.replica_mesh)
                self._runners[stage] = (SyncedStageRunner if synced_channels(module) else StageRunner)(
                    plan.model.stages[stage],
                    module,
                    edges,
                    # the last stage's backward follows at once
                    recompute=plan.recompute and stage != self.placement.last_stage,
                    defer_weights=stage in plan.halved and stage not in self._parallelized,
                    call=self._parallelized.get(stage),
                )
        except Exception as error:
            problem = error
        self.groups.agree(refusal=problem)

    # ---- steps

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run one step on a whole batch: gradients are added to `.grad`, the optimizer is the caller's.

        A pipeline that runs forward only gives the output, and with a target the loss; it keeps no autograd state.
        The same call on every rank; a rank that owns none of the arguments calls `step()`. Raises UserError for
        arguments that don't fit and StageError for what a stage raised, on every other rank RemoteError with that one's
        words and traceback: gradients and buffers are then as before, and the next step can run. PeerError for a lost
        neighbour.
        """
        with nullcontext() if self._trains else torch.inference_mode(False):
            self.begin_step(*args, target=target, **kwargs)
            with self._undone_on_error():
                self.executor.run_list()
            return self.end_step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Steps inside are not summed over replicas and ties; the first one outside sums theirs with its own.

        To accumulate gradients over steps at the price of one sum. Every rank enters it alike. A step inside raises
        UserError where gradients are there that were summed already. Stages under `fully_shard` sum over their replicas
        inside, too: no rank has room for a whole gradient.
        """
        return self._sums.synchronised(False)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._sums.abort()
            with torch.no_grad():
                for state, value in self._states:
                    state.copy_(value)
            self._states = []
            raise

    def begin_step(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """Agree on the batch and hand it out; then `perform_chunk` or the whole list, then `end_step`."""
        opening = self._open(Call.STEP if self._sums.synchronises else Call.UNSYNCED_STEP, self._lane)
        self._begin_step(opening, args, kwargs, target)

    def _begin_step(
        self,
        opening: Opening,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        refusal: Exception | None = None,
    ) -> None:
        self._lane.begin(
            args,
            kwargs,
            target,
            opening=opening,
            keep_output=self.keep_output,
            loss_scale=self.loss_scale,
            refusal=refusal,
        )
        self._sums.attach(self.executor.recorder)
        self._states = [(state, state.detach().clone()) for state in self._written]
        with self._undone_on_error():
            try:
                self._sums.begin()
            except UserError as error:  # perhaps of this rank alone: the others may have nothing to sum
                self._lane.refuse(error)

    def raise_if_refused(self) -> None:
        """End a step that `begin_step` refused here, or on the first rank, as `step` does. For steps by hand."""
        if self._lane.is_refused:
            self._give_up()

    def perform_chunk(self, op: str, stage: int, chunk: int) -> None:
        """Run F or B of one chunk by hand, with the transfers around it (PipelineStage).

        Raises like `step`: also what another rank raised, at the first call that is made after this one heard of it.
        """
        with self._undone_on_error():
            is_well = self.executor.perform_chunk(op, stage, chunk)
        if not is_well:
            self._give_up()

    def end_by_hand(self) -> StepResult:
        """Finish a step whose chunks were run by hand. Raises like `step`, and UserError where one was left out."""
        if left := self.executor.left:
            self._lane.refuse(UserError(f"the step ended before {self.placement.name} ran {', '.join(left)}"))
            self._give_up()
        return self.end_step()

    def _give_up(self) -> None:
        """End a step by hand that failed somewhere. Raises why, on every rank."""
        with self._undone_on_error():
            self.executor.drain_rest()
        self.end_step()

    def end_step(self) -> StepResult:
        """Finish reductions and sends, and share the loss."""
        executor = self.executor
        with self._undone_on_error():
            executor.finish()
            result = self._lane.end(clock_base_ns=self.clock_base_ns + self.clock_offset_ns)
        self._sums.end()
        self._states = []
        self.step_number += 1
        if self._hooks:
            executor.recorder.replay(self.groups.global_rank, self._hooks)
        return result

    # ---- what the other ranks call

    def _open(self, call: Call, lane: Lane | None = None) -> Opening:
        """Return how the first rank opens this call. Where that calls something else, take part in it and raise."""
        self._check_open()
        own = Opening(call, self.step_number, is_first=call.has_batch and (lane is None or not lane.is_prepared))
        opening = self._openings.hear(own)
        problem = opening.problem_with(own, self.groups.global_rank)
        if problem is not None:
            self._follow(opening, problem)
        return opening

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("this run was closed; deploy the pipeline again")

    def _follow(self, opening: Opening, problem: Exception) -> NoReturn:
        """Go through the call that the other ranks make without computing, so that nobody waits. Raises on all of them."""
        if opening.is_first:
            self._openings.refuse(opening, problem)
        elif opening.call is Call.PASS_STEP:
            self._lane.refuse(problem)
            self._lane.pass_over(opening)
        elif opening.call is Call.EVAL:
            self._evaluate(opening, (), {}, None, problem)
        elif opening.call is Call.CLIP:
            self._sum(opening, zero_squares(self.plan.model), problem)
        elif opening.call is Call.UNSCALE:
            self._sum(opening, torch.zeros(1, dtype=torch.float64), problem)
        else:
            with self._sums.synchronised(opening.call is Call.STEP):
                self._begin_step(opening, (), {}, None, problem)
                with self._undone_on_error():
                    self.executor.drain()
                self.end_step()
        raise BugError(f"a step that a rank refused went through: {problem}") from problem

    def pass_step(self) -> StepResult:
        """Join a step of the other replicas for which this one has no batch, in a pipeline that runs forward only.

        Raises UserError before the first step, and like `step`.
        """
        if self._trains:
            raise UserError("a replica without a batch can't train: its gradients would be missing")
        opening = self._open(Call.PASS_STEP, self._lane)
        if opening.is_first:
            self._openings.refuse(
                opening, UserError("the first step needs a batch on every replica: who passes what is agreed on it")
            )
        result = self._lane.pass_over(opening)
        self.step_number += 1
        return result

    def _lists(self, agreement: Agreement) -> tuple[tuple[Action, ...], ...]:
        plan = self.plan
        routes = routes_of(plan.model, replicas=plan.replicas, inputs=agreement.parcels, train=plan.trains)
        return plan.lists_for(routes)

    def close(self) -> None:
        """End what runs beside the steps (threads that hear of other ranks' errors, memory shared with them, process groups);
        none follows, nor anything else that ranks do together.

        Not needed where nobody refers to the run any more. Waits for no other rank.
        """
        if self._alarm is not None:
            self._alarm.close()
        self.groups.close()
        self._is_closed = True

    # ---- evaluation

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run a whole batch forward through the model in eval mode, on the parameters and buffers that train.

        The same call on every rank, with or without a target, whose loss is then in the result. No autograd state is
        kept, no gradient and no random state changes; buffers change only as the model itself changes them in eval
        mode. The first call captures the model in that mode. Raises CaptureError, SplitError; and like `step`.
        """
        if not self._trains:
            with self._same_random_state():
                return self.step(*args, target=target, **kwargs)
        opening = self._open(Call.EVAL, self._evaluation)
        with torch.inference_mode(False):  # the tensors that are kept for later ones must do outside of that mode too
            if self._evaluation is None:
                try:
                    self._evaluation = self._make_evaluation()
                except Exception as error:
                    self._openings.refuse(opening, error)
            return self._evaluate(opening, args, kwargs, target)

    def _evaluate(
        self,
        opening: Opening,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        refusal: Exception | None = None,
    ) -> StepResult:
        lane = self._evaluation
        assert lane is not None
        lane.begin(args, kwargs, target, opening=opening, keep_output=True, refusal=refusal)
        with self._same_random_state(), ExitStack() as stack:
            for copy in self._whole_copies:
                stack.enter_context(copy.filled())
            lane.executor.run_list()
        lane.executor.finish()
        return lane.end(clock_base_ns=self.clock_base_ns + self.clock_offset_ns)

    def _same_random_state(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def _make_evaluation(self) -> Lane:
        if not isinstance(self.source, Evaluates):
            raise UserError("this pipeline can't be captured in eval mode: make it with stagekit.pipeline")
        source = self.source.evaluation()
        spec, plan = source.spec, self.plan
        placement = dataclasses.replace(self.placement, spec=spec)
        edges = {edge.value: edge for edge in spec.edges}
        runners, self._whole_copies = {}, []
        for stage, runner in self._runners.items():
            if stage in self._parallelized and is_sharded(self._parallelized[stage]):
                self._whole_copies.append(WholeCopy(stage, runner.module))
                module = source.shared_module(stage, self._whole_copies[-1].module)
            else:
                module = source.shared_module(stage, runner.module)
            runners[stage] = StageRunner(spec.stages[stage], module, edges, recompute=False)

        def lists(agreement: Agreement) -> tuple[tuple[Action, ...], ...]:
            routes = routes_of(spec, inputs=agreement.parcels, train=False)
            return verified_lists(FORWARD, plan.stage_ranks, plan.num_chunks, routes)[0]

        rules = self.options.output_rules if len(self.options.output_rules) == len(spec.outputs) else ()
        options = dataclasses.replace(self.options, output_rules=rules)
        course = Course(source, placement, f"{spec.graph_hash} {plan.fingerprint}", lists, train=False)
        return Lane(course, options, runners, self.groups, self.device, self._sums, self._alarm, self._openings)

    # ---- gradients and state

    def _synchronise_norms(self) -> None:
        """Have the replicas of stages with SyncBatchNorm meet from now on; on a group of all such stages of a rank."""
        channels = {stage: synced_channels(runner.module) for stage, runner in self._runners.items()}
        group = self.groups.more_replicas(any(channels.values())) if self._trains else None
        for stage, runner in self._runners.items():
            if isinstance(runner, SyncedStageRunner) and group is not None:
                runner.synchronise(Meetings(channels[stage], group, self.device, stage))

    def _gradient_sums(self) -> GradientSums:
        if not self._trains:
            return GradientSums({}, {}, ())
        parameters = {stage: dict(runner.module.named_parameters()) for stage, runner in self._runners.items()}
        reducers: dict[int, Reducer] = {}
        for stage, runner in self._runners.items():
            made_of = self._parallelized.get(stage)
            if made_of is not None and (runner.spec.buckets or is_sharded(made_of)):  # frozen shards are gathered too
                made = reducer_of(runner.spec, made_of, runner.module, self.groups.replica_mesh)
                if made and self.plan.compress:
                    raise UserError(
                        f"buckets.compress is for gradients that the runtime sums, and parallelize gave those of stage {stage} "
                        "to torch; leave compress out, and use its own (MixedPrecisionPolicy(reduce_dtype=...), a comm hook)"
                    )
                reducers |= made
            if stage not in reducers and self.groups.replicas is not None and runner.spec.buckets:
                reducers[stage] = BucketReducer(
                    runner.spec, parameters[stage], self.groups.replicas, self.plan.compress
                )
        ties = {}
        for number, stages in enumerate(routes_of(self.plan.model).ties):
            ranks = sorted({self.plan.stage_ranks[stage] for stage in stages})
            group = self.groups.subgroup(ranks)
            if self.rank in ranks:
                names = tied_names(self.plan.model, stages)
                copies = {name: [parameters[s][name] for s in stages if s in parameters] for name in names}
                ties[number] = TieGroup(copies, group)
        everything = [pair for by_name in parameters.values() for pair in by_name.items()]
        trained = [pair for pair in everything if pair[1].requires_grad]
        return GradientSums(reducers, ties, trained, [pair for pair in everything if not pair[1].requires_grad])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under the unsplit model's names."""
        for runner in self._runners.values():
            yield from runner.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers; the union over ranks loads into the unsplit model, strict."""
        if any(is_sharded(made) for made in self._parallelized.values()):
            self._check_open()  # shards are gathered
        state: dict[str, Tensor] = {}
        for runner in self._runners.values():
            state.update({name: whole(value) for name, value in runner.module.state_dict().items()})
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's share out of a state dict of the unsplit model. Raises UserError for a missing name."""
        for runner in self._runners.values():
            own = runner.module.state_dict()
            missing = [name for name in own if name not in state]
            if missing:
                raise UserError(f"the state dict lacks {missing[:5]} of stage {runner.spec.index}")
            runner.module.load_state_dict({name: like(state[name], value) for name, value in own.items()})

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before.

        The same call on every rank. The norm is summed in float64 per parameter, a tied one once, in an order that no cut
        changes. Raises UserError where ranks call different things.
        """
        opening = self._open(Call.CLIP)
        squares = squares_of(self.plan.model, {stage: runner.module for stage, runner in self._runners.items()})
        if self.replica:  # all replicas have the same gradients
            squares.zero_()
        norm = float(self._sum(opening, squares).sum().sqrt())
        scale = max_norm / (norm + 1e-6)
        if scale < 1.0:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return norm

    def is_anywhere(self, flag: bool) -> bool:
        """Return whether any rank of the world says True; every rank asks alike, on behalf of a GradScaler."""
        return bool(self._sum(self._open(Call.UNSCALE), torch.tensor([float(flag)], dtype=torch.float64)))

    def _sum(self, opening: Opening, values: Tensor, problem: Exception | None = None) -> Tensor:
        """Return the sum over all ranks' `values`, float64. What one rank can't take part in, `problem`, all raise."""
        if self.groups.pipeline_rank == 0:
            self._openings.tell(opening)
        flat = torch.cat([values, torch.tensor([float(problem is not None)], dtype=values.dtype)])
        flat = flat.to(self.groups.comm_device)
        self.groups.sum_over_world(flat)
        if flat[-1]:
            self.groups.agree(refusal=problem)
        return flat[:-1]

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
        """Timings, counters and buffers of training steps; there is none before the first."""
        return self._lane.executor

    @property
    def recorders(self) -> list[Recorder]:
        """Times of the actions of steps and of evaluations, as they are written; for whoever watches from another thread."""
        lanes = (self._lane, self._evaluation)
        return [lane.executor.recorder for lane in lanes if lane is not None and lane.is_prepared]

    @property
    def meets_replicas(self) -> bool:
        """Whether ranks of other replicas may be waited for within a forward or a backward."""
        return bool(self._parallelized) or any(isinstance(each, SyncedStageRunner) for each in self._runners.values())

    @property
    def chunk_targets(self) -> list[Any]:
        """The last step's targets by chunk, on the rank of the last stage; elsewhere nothing."""
        return self._lane.chunk_targets

    @property
    def transports(self) -> dict[int, str]:
        """How this rank exchanges tensors with each other pipeline rank: "shm" (one host's memory), "gloo" or "nccl"."""
        return self.groups.transports

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
