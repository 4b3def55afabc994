"""Run one rank's stages: join, plan, build, step, save. Reads top to bottom; everything it uses lives elsewhere.

Rank 0 makes the plan and publishes it in the attempt's store; every other rank repeats its cut and refuses to join when
it captured something else.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from time import perf_counter
from typing import Any

import structlog
import torch
import torch.distributed as dist

from piped.worker.assignment import Assignment
from piped.worker.link import Link
from piped.worker.observe import Observer, plan_summary
from piped.worker.position import DATA, EVAL, SAVE, UPDATE, Position
from piped.worker.score import Scoring
from piped.worker.update import Update
from stagekit.api import Pipeline, capture_model, plan_pipeline
from stagekit.errors import BugError, UserError
from stagekit.graph.compile.compilers import AUTO
from stagekit.load import check_batch, check_evaluation, check_mode, load_program, schedule_file
from stagekit.plan.decision import Decision, decision_of
from stagekit.plan.planner.candidates import AUTO as AUTO_CHUNKS
from stagekit.plan.split import split_of
from stagekit.planning import chunks_to_compare, ranks_of
from stagekit.program import Batch
from stagekit.run import checkpoint
from stagekit.run.allocator import keep_freed_memory
from stagekit.run.data_parallel import whole
from stagekit.run.lane import StepResult
from stagekit.run.runtime import Run

log = structlog.get_logger()

TRANSFER_TIMEOUT = timedelta(seconds=300)  # the backstop; death is seen by supervisors, hangs by the coordinator


class NumericError(Exception):
    """The loss became NaN or infinite."""


class TrainingError(Exception):
    """Something ended training; `__cause__` says what, `step` where (-1: before the first)."""

    def __init__(self, step: int, run: Run | None) -> None:
        super().__init__(f"training ended in step {step}" if step >= 0 else "the worker could not start")
        self.step, self._run = step, run

    def global_peer(self, pipeline_peer: int) -> int:
        """Return the world rank of a neighbour in this rank's pipeline; -1 stays unknown."""
        if pipeline_peer < 0 or self._run is None:
            return -1
        return self._run.replica * self._run.plan.num_ranks + pipeline_peer


def train(message: dict[str, Any], link: Link) -> dict[str, Any]:
    """Run the whole job on this rank; return the fields of its `done` message. Raises TrainingError."""
    run: Run | None = None
    work: Training | Scoring | None = None
    position: Position | None = None
    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        keep_freed_memory()
        job = Assignment.from_message(message)
        store = join(job, link)
        program = _load(job)
        pipe = make_pipeline(job, program, store, link)
        run = pipe.deploy(job.device)
        run.keep_output = not run.plan.trains
        tell_backends(job, run, store, link)
        if job.checkpoint_dir is not None:
            checkpoint.prove_shared(job.checkpoint_dir, job.fence, job.rank, _shard_ranks(run), run.groups.barrier)
        expected = json.loads(store.get("expected"))
        position = Position(link, run)
        observer = Observer(link, run, job.folder, job.spec, expected=expected, position=position)
        work = (Training if run.plan.trains else Scoring)(job, program, run, observer, position)
        gc.collect()
        gc.freeze()  # what is there now stays: a full collection during a step need not look at it
        gc.enable()
        link.send("joined")
        log.info("worker_joined", rank=job.rank, stages=list(run.own_stages))
        work.run_steps()
        position.enter(SAVE)
        check_replicas(run)
        save(job, run, work.step)
        observer.send_metrics()
        return {
            "step": work.step,
            "loss": work.loss if math.isfinite(work.loss) else "NaN",
        }  # as JSON of protobuf has it
    except Exception as error:
        raise TrainingError(work.step if work else -1, run) from error
    finally:
        if position is not None:
            position.close()
        if run is not None:
            run.close()  # so that no thread of this rank asks a store whose rank ends first


# ---- joining


def join(job: Assignment, link: Link) -> Any:
    """Form the process group and return the attempt's store: rank 0 listens on a port of the system's choice, the endpoint table names it."""
    if job.rank == 0:
        family = socket.AF_INET6 if ":" in job.data_address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((job.data_address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            job.data_address,
            port,
            job.world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=job.start_timeout,
            master_listen_fd=listener.detach(),
        )
        link.send("store", endpoint=f"{job.data_address}:{port}")
    else:
        host, _, port_text = link.receive("endpoint")["endpoint"].rpartition(":")
        store = dist.TCPStore(host, int(port_text), job.world_size, is_master=False, timeout=job.start_timeout)  # type: ignore[attr-defined]
    prefixed = dist.PrefixStore(f"fence{job.fence}", store)  # type: ignore[attr-defined]
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    dist.init_process_group(
        job.backend, store=prefixed, rank=job.rank, world_size=job.world_size, timeout=TRANSFER_TIMEOUT
    )
    return prefixed


def _load(job: Assignment) -> Any:
    program = load_program(job.spec["program"], job.spec["params"], job.source_dir)
    program.chunks = job.spec["pipeline"]["chunks"]
    program.replicas = job.spec["pipeline"]["replicas"]
    check_evaluation(program, job.spec["train"]["eval_every"])
    return program


def make_pipeline(job: Assignment, program: Any, store: Any, link: Link) -> Pipeline:
    """Capture the model; on rank 0 plan it and publish the plan, elsewhere repeat the published cut."""
    pipeline, seed = job.spec["pipeline"], int(job.spec["train"]["seed"])
    ranks, is_open = ranks_of(pipeline), pipeline["chunks"] == AUTO_CHUNKS
    if is_open:
        program.chunks = ranks  # until they are chosen: chunks of any size make the same graph
    args, kwargs = program.example_inputs()
    schedule = schedule_file(pipeline, job.folder)
    scores = check_mode(program, schedule)
    is_planner = job.rank == 0  # the capture is compared with the model once, where the plan is made
    captured = capture_model(
        program.build_model,
        args,
        kwargs,
        seed=seed,
        init=job.init,
        weights=job.spec["weights"] or getattr(program, "weights", None),
        lock_dir=job.folder.parent.parent,
        device=job.device,
        check=is_planner,
        forward_only=scores,
        precision=job.spec["train"]["precision"],
    )
    options = {
        "stages": pipeline["stages"],
        "chunks": chunks_to_compare(captured, ranks, ranks) if is_open and is_planner else program.chunks,
        "example_chunks": program.chunks,
        "tables": "modulo",  # the coordinator has named each rank's stages
        "schedule": schedule,
        "split": split_of(pipeline),
        "stages_per_rank": pipeline["stages_per_rank"],
        "replicas": pipeline["replicas"],
        "buckets": pipeline["buckets"],
        "compile": pipeline["compile"],
        "recompute": pipeline["recompute"],
        "loss_fn": getattr(program, "loss", None),
        "loss_weight": getattr(program, "loss_weight", None),
        "parallelize": getattr(program, "parallelize", None),
        "seed": seed,
    }
    if is_planner:
        pipe = plan_pipeline(captured, **options)
        plan, batches = pipe.plan, int(job.spec["train"]["accumulate"])
        program.chunks = plan.num_chunks
        (job.folder / "plan.json").write_text(plan.to_json())
        if plan.compile != AUTO:  # else once the stages are timed: a plan is told once
            link.send("plan", plan=plan_summary(plan, batches=batches))
        log.info("start_values", how=plan.model.start_values)
        store.set("expected", json.dumps({"bubble": plan.timeline.bubble, "step_s": plan.timeline.makespan * batches}))
        published = {"decision": decision_of(plan).to_json(), "fingerprint": plan.fingerprint}
        store.set("plan", json.dumps(published))
        return pipe
    published = json.loads(store.get("plan"))
    pipe = plan_pipeline(captured, **options, decided=Decision.from_json(published["decision"]))
    program.chunks = pipe.plan.num_chunks
    if pipe.plan.fingerprint != published["fingerprint"]:
        raise UserError(
            f"rank {job.rank} captured another graph ({pipe.plan.fingerprint}) than rank 0 ({published['fingerprint']}); "
            f"torch here is {torch.__version__}: run the same versions and the same source on every node"
        )
    return pipe


def tell_backends(job: Assignment, run: Run, store: Any, link: Link) -> None:
    """Tell what compiles each stage, once it is decided; rank 0 tells it of all stages, in the plan."""
    log.info("stages_compiled", backends={str(stage): name for stage, name in run.compiled.items()})
    if run.replica == 0:
        for stage, name in run.compiled.items():
            store.set(f"compiled/{stage}", name)
    if job.rank != 0:
        return
    plan = run.plan
    compiled = [store.get(f"compiled/{stage.index}").decode() for stage in plan.model.stages]
    if plan.compile == AUTO:
        link.send("plan", plan=plan_summary(plan, compiled, batches=int(job.spec["train"]["accumulate"])))
    (job.folder / "plan.json").write_text(json.dumps({**json.loads(plan.to_json()), "compiled": compiled}))


# ---- steps


class Training:
    """The loop of one rank: data, pipeline, update of the weights, report. `step` counts finished steps."""

    def __init__(self, job: Assignment, program: Any, run: Run, observer: Observer, position: Position) -> None:
        self._job, self._program, self._run, self._observer = job, program, run, observer
        self._position = position
        self._update = Update(job.spec["train"], program, run, position)
        self._accumulate = int(job.spec["train"]["accumulate"])
        self._batches: Iterator[Batch] | None = None  # on the rank of the first stage: data travels from there
        if job.pipeline_rank == 0:
            self._batches = iter(program.batches(0, run.replica, run.plan.replicas))
        self.step, self.loss = 0, 0.0

    def run_steps(self) -> None:
        """Train until the job's steps are done or the program's `on_step` says stop."""
        for _ in range(int(self._job.spec["train"]["steps"])):
            metrics = self.run_step()
            if (every := self._job.spec["train"]["eval_every"]) and self.step % every == 0:
                with self._position.inside(EVAL):
                    metrics |= self.evaluate()
            if self._observer.is_stopped(self._program, self.step, metrics):
                return

    def run_step(self) -> dict[str, float]:
        """Run one step; return what `on_step` gets. Raises NumericError before a broken loss is reported or saved."""
        observer, number, spec = self._observer, self.step, self._job.spec
        self._position.begin_step()
        with observer.tracing(number):
            result, computing_s = self._run_batches()
        self._position.enter(UPDATE)
        optimizing = perf_counter()
        optimizer_s = self._update.apply(number)
        ended = perf_counter()
        if not math.isfinite(self.loss):
            raise NumericError(f"the loss is {self.loss} in step {number}; lower the learning rate or clip gradients")
        self.step += 1
        self._position.end_step()
        step_s = computing_s + ended - optimizing
        metrics = observer.after_step(self.step, result, step_s=step_s, optimizer_s=optimizer_s, loss=self.loss)
        if observer.is_reporter and (self.step % spec["train"]["log_every"] == 0 or self.step == 1):
            told = {"loss": round(self.loss, 4), "tokens_per_s": round(metrics["tokens_per_s"])}
            log.info("step", step=self.step, **told, **self._update.facts())
        return metrics

    def _run_batches(self) -> tuple[StepResult, float]:
        """Run the step's batches, the last of which sums all gradients over replicas; `loss` is the mean of theirs.

        Returns what the last one gave, and the seconds of all without those that data took.
        """
        run, observer, total, seconds = self._run, self._observer, 0.0, 0.0
        self._update.begin()
        for left in reversed(range(self._accumulate)):
            self._position.enter(DATA)
            batch = _next(self._batches, self.step) if self._batches is not None else None
            self._position.begin_batch()
            started = perf_counter()
            with run.no_sync() if left else nullcontext():
                result = run.step(*batch.args, target=batch.target, **batch.kwargs) if batch is not None else run.step()
            total += result.loss
            seconds += perf_counter() - started
            observer.count_tokens(self._program)
            if left:
                observer.after_batch(result, perf_counter() - started)
        self.loss = total / self._accumulate
        return result, seconds

    def evaluate(self) -> dict[str, float]:
        """Call the program's `evaluate` on every rank, between two steps; return what it measured."""
        values = self._program.evaluate(self._run, self.step - 1)
        if not isinstance(values, Mapping) or not all(isinstance(value, int | float) for value in values.values()):
            raise UserError(f"evaluate() returned {values!r}; return a dict of numbers by name")
        measured = {str(name): float(value) for name, value in values.items()}
        if self._observer.is_reporter:
            log.info("evaluated", step=self.step, **{name: round(value, 6) for name, value in measured.items()})
        return measured


def _next(batches: Iterator[Batch], step: int) -> Batch:
    batch: object = next(batches, None)
    if batch is None:
        raise UserError(f"batches() ended before step {step}; yield forever, or ask for fewer steps")
    return check_batch(batch, step)


def check_replicas(run: Run) -> None:
    """Log a digest of this rank's weights; raise if another replica of the same stages holds other ones.

    Buffers are left out: BatchNorm's statistics are those of each replica's own data. Sharded weights are compared whole.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(run.named_parameters(), key=lambda pair: pair[0]):  # a tied one may be here twice
        digest.update(name.encode())
        digest.update(whole(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    log.info("weights_digest", stages=list(run.own_stages), digest=digest.hexdigest()[:16])
    mine = int(digest.hexdigest()[:14], 16)
    if run.groups.replicas is not None and run.groups.spread_over_replicas(mine):
        raise BugError(f"the replicas of stages {list(run.own_stages)} ended with different weights")


def save(job: Assignment, run: Run, step: int) -> None:
    """Save the trained weights where the job file says so; replica 0 holds every stage once."""
    if job.checkpoint_dir is None:
        return
    folder = checkpoint.save(
        job.checkpoint_dir,
        run.state_dict(),
        step=step,
        fence=job.fence,
        rank=job.rank,
        shard_ranks=_shard_ranks(run),
        barrier=run.groups.barrier,
        facts={
            "job_id": job.job_id,
            "fingerprint": run.plan.fingerprint,
            "aliases": [list(pair) for pair in run.plan.model.aliases],
            "compiled": {str(stage): name for stage, name in run.compiled.items()},
        },
    )
    log.info("checkpoint_saved", folder=str(folder))


def _shard_ranks(run: Run) -> range:
    return range(run.plan.num_ranks)
