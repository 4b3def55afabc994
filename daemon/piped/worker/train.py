"""Train one rank's stages: join, plan, build, step, save. Reads top to bottom; everything it uses lives elsewhere.

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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import structlog
import torch
import torch.distributed as dist

from piped.worker.link import Link
from piped.worker.observe import Observer, plan_summary
from stagekit.api import Pipeline, capture_model, plan_pipeline
from stagekit.errors import BugError, UserError
from stagekit.load import load_program
from stagekit.program import Batch
from stagekit.run import checkpoint
from stagekit.run.runtime import Run

log = structlog.get_logger()

TRANSFER_TIMEOUT = timedelta(seconds=300)  # the backstop; death is seen by supervisors, hangs by the coordinator
PLAN_TIMEOUT = timedelta(minutes=10)


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


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank of one attempt, as the shim hands it over."""

    job_id: str
    fence: int
    rank: int
    world_size: int
    device: torch.device
    backend: str
    spec: dict[str, Any]
    data_address: str
    folder: Path  # this rank's own, on the node
    source_dir: str | None

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Assignment:
        """Read the `assign` line."""
        rank, ranks, spec = message["rank"], message["ranks"], message["spec"]
        devices = [entry["device"].partition(":")[0] for entry in ranks]
        all_cuda = all(device == "cuda" for device in devices)
        backend = spec["backend"] if spec["backend"] != "auto" else ("nccl" if all_cuda else "gloo")
        mine = next(entry for entry in ranks if entry["rank"] == rank)
        is_cuda = mine["device"].startswith("cuda")
        folder = Path(message["attempt_dir"]) / "ranks" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(
            message["job_id"],
            message["fence"],
            rank,
            message["world_size"],
            torch.device("cuda", 0) if is_cuda else torch.device("cpu"),  # CUDA_VISIBLE_DEVICES shows one device
            backend,
            spec,
            message["data_address"],
            folder,
            message.get("source_dir"),
        )

    @property
    def pipeline_rank(self) -> int:
        """Rank within its replica."""
        return self.rank % (self.world_size // int(self.spec["pipeline"]["replicas"]))


def train(message: dict[str, Any], link: Link) -> dict[str, Any]:
    """Run the whole job on this rank; return the fields of its `done` message. Raises TrainingError."""
    run: Run | None = None
    step, loss = -1, 0.0
    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        job = Assignment.from_message(message)
        store = join(job, link)
        program = _load(job)
        pipe = make_pipeline(job, program, store, link)
        counter = TokenCounter(program)
        pipe = pipe.with_loss_weight(counter.loss_weight)
        run = pipe.deploy(job.device)
        run.keep_output = False
        expected = json.loads(store.get("expected"))
        steps = int(job.spec["train"]["steps"])
        observer = Observer(link, run, job.folder, steps=steps, expected=expected)
        parameters = [(name, p) for name, p in run.named_parameters() if p.requires_grad]
        optimizer = program.optimizer(parameters) if parameters else None
        gc.collect()
        gc.freeze()  # what is there now stays: a full collection during a step need not look at it
        gc.enable()
        link.send("joined")
        log.info("worker_joined", rank=job.rank, stages=list(run.own_stages), parameters=len(parameters))
        batches = _batches(job, program, run)
        for step in range(steps):
            loss = train_step(job, program, run, observer, optimizer, batches, step, counter)
        check_replicas(run)
        save(job, run)
        observer.send_metrics()
        return {"step": steps, "loss": loss}
    except Exception as error:
        raise TrainingError(step, run) from error


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
            timeout=PLAN_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        link.send("store", endpoint=f"{job.data_address}:{port}")
    else:
        host, _, port_text = link.receive("endpoint")["endpoint"].rpartition(":")
        store = dist.TCPStore(host, int(port_text), job.world_size, is_master=False, timeout=PLAN_TIMEOUT)  # type: ignore[attr-defined]
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
    return program


def make_pipeline(job: Assignment, program: Any, store: Any, link: Link) -> Pipeline:
    """Capture the model; on rank 0 plan it and publish the plan, elsewhere repeat the published cut."""
    pipeline, seed = job.spec["pipeline"], int(job.spec["train"]["seed"])
    args, kwargs = program.example_inputs()
    is_planner = job.rank == 0  # the capture is compared with the model once, where the plan is made
    captured = capture_model(program.build_model, args, kwargs, seed=seed, device=job.device, check=is_planner)
    options = {
        "stages": pipeline["stages"],
        "chunks": pipeline["chunks"],
        "schedule": pipeline["schedule"],
        "split": pipeline["split"],
        "stages_per_rank": pipeline["stages_per_rank"],
        "replicas": pipeline["replicas"],
        "buckets": pipeline["buckets"],
        "compile": _backend_of(pipeline["compile"], job.device),
        "recompute": pipeline["recompute"],
        "loss_fn": program.loss,
        "loss_weight": program.loss_weight,
        "seed": seed,
    }
    if is_planner:
        pipe = plan_pipeline(captured, **options)
        plan = pipe.plan
        (job.folder / "plan.json").write_text(plan.to_json())
        link.send("plan", plan=plan_summary(plan))
        store.set("expected", json.dumps({"bubble": plan.timeline.bubble, "step_s": plan.timeline.makespan}))
        nodes = [stage.first_node for stage in plan.model.stages]
        store.set("plan", json.dumps({"nodes": nodes, "fingerprint": plan.fingerprint}))
        return pipe
    published = json.loads(store.get("plan"))
    pipe = plan_pipeline(captured, **options, at_nodes=published["nodes"])
    if pipe.plan.fingerprint != published["fingerprint"]:
        raise UserError(
            f"rank {job.rank} captured another graph ({pipe.plan.fingerprint}) than rank 0 ({published['fingerprint']}); "
            f"torch here is {torch.__version__}: run the same versions and the same source on every node"
        )
    return pipe


def _backend_of(compile: str, device: torch.device) -> str:
    """Resolve "auto": measured on CPU, inductor gave 0.76-1.5x of eager, so eager there; CUDA's default is inductor."""
    if compile != "auto":
        return compile
    return "inductor" if device.type == "cuda" else "eager"


class TokenCounter:
    """The program's loss weight, which also counts a step's tokens: it sees every chunk's target once."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.tokens = 0

    def loss_weight(self, target: Any) -> float:
        """Return the program's weight of a chunk."""
        self.tokens += int(self._program.tokens(target)) if hasattr(self._program, "tokens") else 0
        return float(self._program.loss_weight(target))


# ---- steps


def _batches(job: Assignment, program: Any, run: Run) -> Iterator[Batch] | None:
    """Return the replica's batches on the rank of its first stage, None elsewhere: data travels from there."""
    if job.pipeline_rank != 0:
        return None
    batches: Iterator[Batch] = iter(program.batches(0, run.replica, run.plan.replicas))
    return batches


def train_step(
    job: Assignment,
    program: Any,
    run: Run,
    observer: Observer,
    optimizer: torch.optim.Optimizer | None,
    batches: Iterator[Batch] | None,
    step: int,
    counter: TokenCounter,
) -> float:
    """Run step number `step` (from 0): data, pipeline, clipping, optimizer, report. Return its loss."""
    traced: list[tuple[Any, ...]] = []
    unhook = run.on_action(lambda *event: traced.append(event)) if step in job.spec["observe"]["trace_steps"] else None
    batch = _next(batches, step) if batches is not None else None
    started = perf_counter()
    result = run.step(*batch.args, target=batch.target, **batch.kwargs) if batch is not None else run.step()
    if (limit := job.spec["train"]["clip_grad_norm"]) is not None:
        run.clip_grad_norm_(limit)
    optimizing = perf_counter()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    optimized = perf_counter()
    loss = result.loss
    ended = perf_counter()
    if not math.isfinite(loss):
        raise NumericError(f"the loss is {loss} in step {step}; lower the learning rate or clip gradients")
    observer.tokens, counter.tokens = counter.tokens, 0
    metrics = observer.after_step(step + 1, result, step_s=ended - started, optimizer_s=optimized - optimizing)
    if unhook is not None:
        unhook()
        observer.write_trace(step, traced)
    if observer.is_reporter:
        program.on_step(step, metrics)
        if (step + 1) % job.spec["train"]["log_every"] == 0 or step == 0:
            log.info("step", step=step + 1, loss=round(loss, 4), tokens_per_s=round(metrics["tokens_per_s"]))
    return loss


def _next(batches: Iterator[Batch], step: int) -> Batch:
    batch = next(batches, None)
    if batch is None:
        raise UserError(f"batches() ended before step {step}; yield forever, or ask for fewer steps")
    return batch


def check_replicas(run: Run) -> None:
    """Log a digest of this rank's weights; raise if another replica of the same stages holds other ones.

    Buffers are left out: BatchNorm's statistics are those of each replica's own data.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(run.named_parameters()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    log.info("weights_digest", stages=list(run.own_stages), digest=digest.hexdigest()[:16])
    mine = int(digest.hexdigest()[:14], 16)
    if run.groups.replicas is not None and run.groups.spread_over_replicas(mine):
        raise BugError(f"the replicas of stages {list(run.own_stages)} ended with different weights")


def save(job: Assignment, run: Run) -> None:
    """Save the trained weights where the job file says so; replica 0 holds every stage once."""
    if job.spec["checkpoint"] is None:
        return
    folder = checkpoint.save(
        Path(job.spec["checkpoint"]["dir"]),
        run.state_dict(),
        step=int(job.spec["train"]["steps"]),
        fence=job.fence,
        rank=job.rank,
        shard_ranks=range(run.plan.num_ranks),
        barrier=run.groups.barrier,
        facts={
            "job_id": job.job_id,
            "fingerprint": run.plan.fingerprint,
            "aliases": [list(pair) for pair in run.plan.model.aliases],
        },
    )
    log.info("checkpoint_saved", folder=str(folder))
