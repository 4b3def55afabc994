"""What a script calls: `pipeline(...)` → `Pipeline` → `.deploy()` → `.step()`.

Puts the rooms together: stagekit.graph captures and cuts, stagekit.plan schedules and verifies, stagekit.run runs.
Also `PipelineStage` (one stage by hand, our ancestor's surface) and `init()` (one script for pipectl and torchrun).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagekit.arguments import (
    bucket_rule,
    check_counts_and_kinds,
    check_forward,
    check_model,
    check_options,
    check_outputs,
    check_specs,
    compression,
    schedule_name,
)
from stagekit.errors import UserError
from stagekit.graph.capture.capture import Captured, capture
from stagekit.graph.capture.precision import FP32, precise
from stagekit.graph.compile.compilers import resolve
from stagekit.graph.cut.costs import Cost
from stagekit.graph.cut.cut import Cut
from stagekit.graph.values.build import Start
from stagekit.plan.contract import ModelSpec, StageSpec
from stagekit.plan.decision import Decision, decision_of
from stagekit.plan.plan import Plan, check_counts, check_per_rank
from stagekit.plan.planner.search import Ranking
from stagekit.plan.schedules.registry import FORWARD, is_forward_only
from stagekit.plan.schedules.registry import check as check_schedule
from stagekit.plan.split import Balanced, check_split, parse_split
from stagekit.planning import Question, cut_for, open_ranks, repeated
from stagekit.run.agreement import exchange_text
from stagekit.run.lane import RunOptions
from stagekit.run.loss import LossFunction, LossWeight
from stagekit.run.merge import flatten_rules
from stagekit.run.runtime import Run
from stagekit.run.wrapped import Parallelize

__all__ = ["Context", "Pipeline", "PipelineStage", "Stage", "init", "pipeline"]


class Stage:
    """One stage to look at: `module` is built when first asked for."""

    def __init__(self, cut: Cut, spec: StageSpec) -> None:
        self._cut, self.spec = cut, spec
        self._module: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        """The stage's module with its start weights, a chain of bucket submodules."""
        if self._module is None:
            self._module = self._cut.stage_module(self.spec.index, device=torch.device("cpu"))
        return self._module

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Its parameters under the unsplit model's names."""
        return dict(self.module.named_parameters())

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What it takes: graph inputs, values of earlier stages, sizes."""
        return self.spec.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that it returns."""
        return self.spec.outputs


@dataclass(frozen=True, slots=True)
class CutSource:
    """A cut model as the runtime takes it (stagekit.run.runtime.StageSource)."""

    cut: Cut

    @property
    def spec(self) -> ModelSpec:
        """The cut model."""
        return self.cut.spec

    def stage_module(self, index: int, *, device: torch.device) -> nn.Module:
        """Return one stage with its start weights, and nothing of the others."""
        return self.cut.stage_module(index, device=device)

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of a call in the order of the spec's inputs."""
        return self.cut.captured.flatten_inputs(args, dict(kwargs))

    def unflatten_output(self, leaves: list[Any]) -> Any:
        """Return what the model returns, out of its leaves."""
        return self.cut.captured.unflatten_output(leaves)

    def evaluation(self) -> CutSource:
        """Return the model in eval mode, cut to what these stages own. Raises CaptureError, SplitError."""
        return CutSource(self.cut.captured.in_eval_mode().cut_like(self.cut))

    def shared_module(self, index: int, owner: nn.Module) -> nn.Module:
        """Return one stage on the parameters and buffers of `owner`, a stage of the cut that this one follows."""
        return self.cut.stage_module(index, tensors=owner)


class Pipeline:
    """A captured model, cut and planned. Holds no weights of its own until it is deployed."""

    def __init__(
        self,
        cut: Cut,
        plan: Plan,
        options: RunOptions,
        ranking: Ranking | None = None,
        node_costs: Mapping[str, Cost] | None = None,
    ) -> None:
        """`ranking`: the plans that were compared, where something was left to choose; the first is this one. None on a
        rank that took rank 0's. `node_costs`: what each operation of a chunk took where it was measured for the cut.
        """
        self.options, self.ranking, self.node_costs = options, ranking, dict(node_costs or {})
        self._set_cut(cut, plan)

    def _set_cut(self, cut: Cut, plan: Plan) -> None:
        self.cut, self.plan = cut, plan
        self.source = CutSource(cut)
        self.stages = [Stage(cut, spec) for spec in plan.model.stages]

    def deploy(
        self,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        compiled: Mapping[int, str] | None = None,
    ) -> Run:
        """Build this rank's stages. Needs an initialised process group, or a world of 1; called on every rank of it.

        `compiled`: backends by stage as an earlier run's `Run.compiled` has them; "auto" then times nothing.

        Costs are measured, so two ranks may plan the same capture differently: all take the decision of the group's
        rank 0, and `plan` and `stages` are that one's afterwards. Raises UserError when the world does not fit
        stages / stages_per_rank × replicas.
        """
        if device is None:
            is_cuda = dist.is_initialized() and "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        check_counts(len(self.stages), self.plan.stages_per_rank, self.plan.replicas, _world_size(group))
        self._take_plan_of_rank_0(torch.device(device), group)
        options = dataclasses.replace(self.options, compiled=compiled)
        return Run(self.source, self.plan, options, torch.device(device), group)

    def _take_plan_of_rank_0(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        if _world_size(group) == 1:
            return
        mine = [decision_of(self.plan).to_json(), self.plan.model.graph_hash]
        comm_device = device if "nccl" in str(dist.get_backend(group)) else torch.device("cpu")
        decided, graph_hash = json.loads(exchange_text(json.dumps(mine), group, comm_device)[0])
        if decided == mine[0] or graph_hash != mine[1]:
            return  # the same; or another model, which the first step refuses with every rank's number
        plan, decision = self.plan, Decision.from_json(decided)
        made = repeated(
            self.cut.captured, decision, buckets=self.cut.buckets, own_schedule=plan.schedule, known=self.cut
        )
        self.ranking = None  # of what this rank would have chosen
        self._set_cut(made.cut, made.plan(**_options_of(plan)))


def _options_of(plan: Plan) -> dict[str, Any]:
    names = ("replicas", "compile", "recompute", "compress")
    return {name: getattr(plan, name) for name in names}


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def pipeline(
    model: nn.Module | Callable[[], nn.Module],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None,
    stages: int | None = None,
    ranks: int | None = None,
    chunks: int,
    schedule: str | Path | None = None,
    split: str | Sequence[str] | Balanced = "balanced",
    stages_per_rank: int | Sequence[int] | str = 1,
    replicas: int = 1,
    buckets: Mapping[str, int | str] | None = None,
    loss_weight: LossWeight | None = None,
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
    output_spec: Any = None,
    compile: str = "eager",
    recompute: bool = False,
    parallelize: Parallelize | None = None,
    precision: str = FP32,
    seed: int = 0,
    init: str = "",
    weights: str | Path | None = None,
    device: torch.device | str = "cpu",
) -> Pipeline:
    """Capture `model`, cut it into `stages`, schedule `chunks` of a batch over them.

    `args` and `kwargs` are ONE chunk. `model` is a module (its weights are copied) or a callable that builds it (weights
    are then made stage by stage). `init`: "stream" equals `torch.manual_seed(seed); model()`, "per_op" seeds each random
    operation by itself and draws only what a stage owns; the default is stream up to 4 billion parameters. `weights`: a
    safetensors file, a folder of them (Hugging Face), or a checkpoint of ours, read stage by stage. `loss_fn(output, target)` returns a
    chunk's mean loss; `loss_weight(target)` its weight, rows by default, and "sum" adds losses that are sums over rows. `split` says where stages begin: "balanced" or
    `Balanced(...)` with its options, "parameters", "layers", "bucket:25MiB", or module paths. `compile`: "eager", "default"
    (inductor on CUDA), a backend of torch.compile, or "auto", which times eager and inductor when deployed. `buckets`
    {"cap": bytes, "first": bytes} cuts each stage into submodules whose gradients are reduced together, "compress": "bf16"
    rounds those on their way. `precision`: "bf16" or "fp16" runs model and loss under torch.autocast of that type, whose
    parameters stay as they are; with fp16 use `GradScaler(run)`. `args_spec` and `kwargs_spec` say of an argument
    `Split(dim)` or `Replicate()`, `output_spec` of an output `Cat(dim)`, `Stack()`, `Sum()`, `Mean()` or a function.
    `stages_per_rank` is a number, or one number per rank, each of which then holds the next so many stages.
    `schedule="auto"` compares all schedules on measured costs and takes the fastest that fits `Balanced(memory_bytes=…)`,
    cutting for it; `stages_per_rank="auto"`, with `ranks` instead of `stages`, chooses that too. `Pipeline.ranking` has the
    runners-up and why the others lost.
    `schedule` is a name of stagekit.plan.schedules or a CSV file: "1f1b" by default, and "forward" where `loss_fn` is None:
    the model then runs in eval mode, for its outputs alone.
    `parallelize(stage_module, mesh)` changes each stage where it is deployed: it returns `fully_shard(stage_module,
    mesh=mesh)`, or DistributedDataParallel over `mesh.get_group()`; `mesh` has the stage's replicas.
    The module and the random state are left as they were. Raises CaptureError, SplitError, ScheduleError, UserError.
    """
    schedule = schedule_name(schedule) or ("1f1b" if loss_fn is not None else FORWARD)
    open_on = open_ranks(schedule, stages, stages_per_rank, ranks)
    check_counts_and_kinds(
        stages=stages or ranks,
        chunks=chunks,
        stages_per_rank=1 if open_on else stages_per_rank,
        replicas=replicas,
        seed=seed,
        compile=compile,
        loss_fn=loss_fn,
        split=split,
    )
    check_options(
        recompute=recompute, loss_weight=loss_weight, init=init, weights=weights, device=device, precision=precision
    )
    check_specs(args_spec, kwargs_spec, output_spec)
    if open_on is None:
        assert stages is not None and not isinstance(stages_per_rank, str)
        stages_per_rank = check_per_rank(schedule, stages, stages_per_rank, replicas)
        check_schedule(schedule, stages, stages_per_rank, chunks)
        check_split(split, stages, stages_per_rank)
    elif isinstance(split, str):
        parse_split(split)
    check_forward(schedule, loss_fn=loss_fn, loss_weight=loss_weight, recompute=recompute)
    bucket_rule(buckets)
    compression(buckets)
    captured = capture_model(
        model,
        args,
        kwargs,
        seed=seed,
        init=init,
        weights=weights,
        device=device,
        args_spec=args_spec,
        kwargs_spec=kwargs_spec,
        forward_only=is_forward_only(schedule),
        precision=precision,
    )
    return plan_pipeline(
        captured,
        loss_fn=loss_fn,
        stages=stages,
        ranks=ranks,
        chunks=chunks,
        schedule=schedule,
        split=split,
        stages_per_rank=stages_per_rank,
        replicas=replicas,
        buckets=buckets,
        loss_weight=loss_weight,
        output_spec=output_spec,
        compile=compile,
        recompute=recompute,
        parallelize=parallelize,
        seed=seed,
    )


def capture_model(
    model: nn.Module | Callable[[], nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    init: str = "",
    weights: str | Path | None = None,
    lock_dir: Path | None = None,
    device: torch.device | str = "cpu",
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
    check: bool = True,
    forward_only: bool = False,
    precision: str = FP32,
) -> Captured:
    """First half of `pipeline`: the model as one graph, compared with the model unless `check` is False (a worker
    repeats a capture that was checked when the plan was made). `lock_dir`: a folder of this node in which its workers
    take turns where a whole model must be built. `forward_only`: in eval mode, without gradients. `precision`: also
    of the loss that `plan_pipeline` is given. Raises CaptureError, UserError.
    """
    check_model(model, args, kwargs)
    again = functools.partial(
        capture,
        model,
        args,
        dict(kwargs or {}),
        seed=seed,
        device=str(device),
        args_spec=args_spec,
        kwargs_spec=dict(kwargs_spec) if kwargs_spec else None,
        start=Start(init, Path(weights) if weights else None, lock_dir),
        precision=precision,
    )
    if forward_only:
        return again(check=check, training=False).without_gradients()
    return dataclasses.replace(again(check=check), again=functools.partial(again, check=False))


def plan_pipeline(
    captured: Captured,
    *,
    loss_fn: LossFunction | None,
    stages: int | None = None,
    ranks: int | None = None,
    chunks: int | Sequence[int],
    schedule: str = "1f1b",
    split: str | Sequence[str] | Balanced = "balanced",
    stages_per_rank: int | Sequence[int] | str = 1,
    tables: str = "any",
    example_chunks: int | None = None,
    replicas: int = 1,
    buckets: Mapping[str, int | str] | None = None,
    loss_weight: LossWeight | None = None,
    output_spec: Any = None,
    compile: str = "eager",
    recompute: bool = False,
    parallelize: Parallelize | None = None,
    seed: int = 0,
    decided: Decision | None = None,
    at_nodes: Sequence[str] | None = None,
    measured: bool = True,
) -> Pipeline:
    """Second half of `pipeline`: cut and schedule. `decided` repeats a published plan, `at_nodes` a cut, without measuring.

    `chunks` may be several counts to choose from, `example_chunks` is then that of the example. `tables`: "modulo" leaves
    schedules out whose ranks are V-shaped.
    """
    check_outputs(captured)
    backend = resolve(compile, captured.device)
    made = cut_for(
        captured,
        Question(
            split,
            stages,
            ranks,
            schedule,
            stages_per_rank,
            chunks,
            recompute,
            backend != "eager",
            tables,
            example_chunks,
        ),
        buckets=bucket_rule(buckets),
        decided=decided,
        at_nodes=at_nodes,
        measured=measured,
    )
    compress = compression(buckets)
    plan = made.plan(replicas=replicas, compile=backend, recompute=recompute, compress=compress)
    if loss_fn is not None:
        loss_fn = precise(loss_fn, captured.precision, captured.device)
    rules = flatten_rules(output_spec, made.cut.spec.outputs)
    return Pipeline(
        made.cut, plan, RunOptions(loss_fn, loss_weight, seed, rules, parallelize), made.ranking, made.node_costs
    )


class PipelineStage:
    """One stage by hand: the caller decides which chunk runs when; transfers follow the compute.

    Every rank of the pipeline makes one and steps through the same chunks:
    `begin(...)`, then `forward_one_chunk(c)` and `backward_one_chunk(c)` in any valid order, then `end()`.
    An error on one rank ends the step on all of them, at the next of these calls: StageError there, RemoteError elsewhere.
    """

    def __init__(
        self,
        pipe: Pipeline,
        stage_index: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._run = pipe.deploy(device, group)
        if self._run.own_stages != (stage_index,):
            raise UserError(
                f"rank {self._run.rank} holds stages {list(self._run.own_stages)}, not stage {stage_index}; "
                "PipelineStage runs one stage per rank, stage number = rank"
            )
        self.stage_index = stage_index

    @property
    def run(self) -> Run:
        """Parameters, state dict and the rest of a deployed stage."""
        return self._run

    def begin(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """Start a step on a whole batch, as `Run.step` takes it."""
        self._run.begin_step(*args, target=target, **kwargs)
        self._run.raise_if_refused()

    def forward_one_chunk(self, chunk: int) -> None:
        """Receive, run and send the forward of `chunk`."""
        self._run.perform_chunk("F", self.stage_index, chunk)

    def backward_one_chunk(self, chunk: int) -> None:
        """Receive, run and send the backward of `chunk`."""
        self._run.perform_chunk("B", self.stage_index, chunk)

    def end(self) -> Any:
        """Finish the step (reductions, sends); returns a StepResult."""
        return self._run.end_by_hand()


@dataclass(frozen=True, slots=True)
class Context:
    """Where this process is: the same script serves pipectl and torchrun."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    replica: int = 0  # as pipectl placed this rank; under torchrun `Run.replica` says so once a pipeline is deployed
    stage: int | None = None  # None: not known before a pipeline is deployed
    resume_step: int = 0


def init(backend: str | None = None) -> Context:
    """Join the process group that torchrun describes in the environment, or stand alone without one.

    The backend is nccl where every rank of this host has a CUDA device of its own, else gloo: hosts with different
    numbers of devices must name it. Calling it again changes nothing.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(local_rank + 1)))
    has_cuda = torch.cuda.is_available() and ranks_here <= torch.cuda.device_count() and backend != "gloo"
    device = torch.device("cuda", local_rank) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group(backend or ("nccl" if has_cuda else "gloo"))
    return Context(rank, world_size, local_rank, device)
