"""What a worker tells of each step: metrics, progress, records on the node, traces of chosen steps.

Reads the executor's timings after a step, and asks the program what it wants of it; decides nothing about training.
Called by piped.worker.train and piped.worker.score.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from time import monotonic, time
from typing import Any

import structlog

from piped.metrics import DIRECTIONS, PHASES, WAYS
from piped.worker.histograms import Samples
from piped.worker.link import Link
from piped.worker.position import ALL, HOOK, STEP, Position
from stagekit.plan.actions import COMPUTE, Op
from stagekit.plan.plan import Plan
from stagekit.run.lane import StepResult
from stagekit.run.runtime import Run

log = structlog.get_logger()

REPORT_EVERY_S = 1.0
_PHASE = {Op.F: "forward", Op.B: "backward", Op.I: "backward_input", Op.W: "backward_weight"}
_RECEIVES = {
    Op.F: "recv_forward",
    Op.B: "recv_backward",
    Op.I: "recv_backward",
}  # where a chunk waits for its neighbour
_SENDS = {Op.SEND_F: "send_forward", Op.SEND_B: "send_backward"}


class Observer:
    """Samples of this rank, sent once a second and at the end.

    The rank with the last stage of replica 0 also reports the job's own series: steps, loss, latencies.
    """

    def __init__(
        self,
        link: Link,
        run: Run,
        folder: Path,
        spec: Mapping[str, Any],
        *,
        expected: dict[str, float],
        position: Position,
    ) -> None:
        self._link, self._run, self._folder, self._position = link, run, folder, position
        self._steps, self._trace_steps = int(spec["train"]["steps"]), frozenset(spec["observe"]["trace_steps"])
        self.samples = Samples()
        self.is_reporter = run.replica == 0 and run.rank == run.placement.last_rank
        self._tokens = 0  # of the current step's targets
        self._rows, self._num_batches, self._batches_s = 0, 0, 0.0  # of the current step, those that are over
        self._sent_at = float("-inf")
        self._records = (folder / "steps.jsonl").open("w") if self.is_reporter else None
        self._waiting = {(op, s) for op in _RECEIVES for s in run.own_stages if self._waits_for_peer(op, s)}
        self._declare(expected)

    def _declare(self, expected: dict[str, float]) -> None:
        samples = self.samples
        for stage in map(str, self._run.own_stages):
            for phase in PHASES:
                samples.declare("piped_chunk_duration_seconds", stage=stage, phase=phase)
            for direction in DIRECTIONS:
                samples.declare("piped_p2p_bytes", stage=stage, direction=direction)
                samples.declare("piped_p2p_wait_seconds", stage=stage, direction=direction)
            samples.declare("piped_grad_sync_seconds", stage=stage)
            samples.declare("piped_grad_sync_exposed_seconds", stage=stage)
            samples.declare("piped_optimizer_duration_seconds", stage=stage)
            samples.declare("piped_bubble_seconds", stage=stage)
        if self.is_reporter:
            for name in ("piped_steps", "piped_samples", "piped_tokens", "piped_step_duration_seconds"):
                samples.declare(name)
            for phase in WAYS:
                samples.declare("piped_chunk_latency_seconds", phase=phase)
            samples.set("piped_job_expected_bubble_ratio", expected["bubble"])
            samples.set("piped_job_expected_step_seconds", expected["step_s"])

    # ---- one step

    def after_step(
        self,
        step: int,
        result: StepResult,
        *,
        step_s: float,
        optimizer_s: float,
        num_replicas: int | None = None,
        loss: float | None = None,
    ) -> dict[str, float]:
        """Record a finished step (its number from 1) and return what the program's `on_step` gets.

        `result` is that of its last batch, and `loss` the step's where it has several. `num_replicas` took part in it;
        None: all.
        """
        self.after_batch(result, step_s - self._batches_s)
        own = self._run.own_stages
        for stage in map(str, own):
            self.samples.observe("piped_optimizer_duration_seconds", optimizer_s / len(own), stage=stage)
        metrics: dict[str, float] = {}
        if self.is_reporter:
            replicas = num_replicas or self._run.plan.replicas
            metrics = self._observe_job(step, result.loss if loss is None else loss, step_s, replicas)
        self._rows, self._num_batches, self._batches_s = 0, 0, 0.0
        self._report(step, metrics)
        return metrics

    def after_batch(self, result: StepResult, batch_s: float) -> None:
        """Record one of a step's batches; `after_step` does it for the last one."""
        self._observe_actions(batch_s)
        self._num_batches, self._batches_s = self._num_batches + 1, self._batches_s + batch_s
        if not self.is_reporter:
            return
        self._rows += sum(self._run.executor.step.chunk_sizes)
        ways = WAYS if self._run.plan.trains else WAYS[:1]
        for phase, latencies in zip(ways, result.chunk_latencies_s(), strict=False):
            for chunk, latency in enumerate(latencies):
                which = (self._run.executor.step.number, chunk)
                self.samples.observe("piped_chunk_latency_seconds", max(0.0, latency), exemplar=which, phase=phase)

    def after_pass(self, step: int, *, step_s: float) -> dict[str, float]:
        """Report a step of other replicas in which this one had no batch; returns what the program's `on_step` gets."""
        metrics = {"loss": float("nan"), "step_s": step_s, "tokens_per_s": 0.0, "rows_per_s": 0.0}
        self._report(step, metrics)
        return metrics

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        now = monotonic()
        if now - self._sent_at >= REPORT_EVERY_S or step == self._steps:
            self._sent_at = now
            if self.is_reporter:
                told = {name: metrics[name] for name in ("loss", "step_s", "tokens_per_s")}
                self._link.send("progress", step=step, steps=self._steps, **told)
            self.send_metrics()

    def _observe_actions(self, step_s: float) -> None:
        samples, recorder, step = self.samples, self._run.executor.recorder, self._run.executor.step.number
        busy_ns = 0
        for i, action in enumerate(recorder.actions):
            duration_ns = recorder.end_ns[i] - recorder.start_ns[i]
            stage = str(action.stage)
            if action.op in COMPUTE:
                busy_ns += duration_ns
                phase = _PHASE[action.op]
                which = (step, action.chunk)
                samples.observe(
                    "piped_chunk_duration_seconds", duration_ns * 1e-9, exemplar=which, stage=stage, phase=phase
                )
                if (action.op, action.stage) in self._waiting:
                    wait_s = recorder.wait_ns[i] * 1e-9
                    direction = _RECEIVES[action.op]
                    samples.observe("piped_p2p_wait_seconds", wait_s, stage=stage, direction=direction)
            elif action.op in _SENDS:
                direction = _SENDS[action.op]
                samples.observe("piped_p2p_wait_seconds", duration_ns * 1e-9, stage=stage, direction=direction)
        for (stage_index, direction), size in self._run.executor.bytes.items():
            samples.set("piped_p2p_bytes", size, stage=str(stage_index), direction=direction)
        for stage_index in {entry[0] for entry in recorder.reduce}:
            entries = [entry for entry in recorder.reduce if entry[0] == stage_index]
            sync_ns = max(entry[3] for entry in entries) - min(entry[2] for entry in entries)
            samples.observe("piped_grad_sync_seconds", sync_ns * 1e-9, stage=str(stage_index))
        for stage_index, waited_ns in recorder.reduce_wait_ns.items():
            samples.observe("piped_grad_sync_exposed_seconds", waited_ns * 1e-9, stage=str(stage_index))
        first = str(self._run.own_stages[0])
        samples.add("piped_bubble_seconds", max(0.0, step_s - busy_ns * 1e-9), stage=first)

    def _waits_for_peer(self, op: Op, stage: int) -> bool:
        plan = self._run.plan
        for edge in plan.model.edges:
            if op is Op.F and stage in edge.targets and plan.stage_ranks[edge.source] != self._run.rank:
                return True
            returns = op in (Op.B, Op.I) and plan.trains and edge.source == stage and edge.tensor.requires_grad
            if returns and any(plan.stage_ranks[target] != self._run.rank for target in edge.targets):
                return True
        return False

    def _observe_job(self, step: int, loss: float, step_s: float, replicas: int) -> dict[str, float]:
        samples = self.samples
        rows, tokens = self._rows * replicas, (self._tokens or self._rows) * replicas
        self._tokens = 0
        samples.add("piped_steps", 1)
        samples.add("piped_samples", rows)
        samples.add("piped_tokens", tokens)
        has_loss = self._run.plan.trains or not isnan(loss)  # batches may be scored without a target
        if has_loss:
            samples.set("piped_loss", loss)
        samples.set("piped_job_last_step_timestamp_seconds", time())
        samples.observe("piped_step_duration_seconds", step_s)
        assert self._records is not None
        record: dict[str, Any] = {"step": step, "loss": loss} if has_loss else {"step": step}
        record |= {"duration_s": step_s, "tokens": tokens, "rows": rows}
        self._records.write(json.dumps(record) + "\n")
        self._records.flush()
        metrics = {"loss": loss, "step_s": step_s, "tokens_per_s": tokens / step_s}
        return metrics if self._run.plan.trains else metrics | {"rows_per_s": rows / step_s}

    def send_metrics(self) -> None:
        """Send everything measured so far."""
        self._link.send("metrics", samples=self.samples.snapshot())

    # ---- what the program is asked

    def count_tokens(self, program: Any) -> None:
        """Add the tokens of the batch that ran last to the step's, as the program counts them."""
        if self.is_reporter and hasattr(program, "tokens"):
            self._tokens += sum(int(program.tokens(target)) for target in self._run.chunk_targets)

    def is_stopped(self, program: Any, step: int, metrics: dict[str, float]) -> bool:
        """Hand a finished step (its number from 1) to the program's `on_step`; say on every rank alike whether it stops
        the job. Called on every rank.
        """
        if not hasattr(program, "on_step"):
            return False
        stop = False
        if self.is_reporter:
            with self._position.inside(HOOK):
                stop = bool(program.on_step(step - 1, metrics))
        with self._position.inside(STEP, ALL):
            if not self._run.groups.any_of_world(stop):
                return False
        log.info("stopped_by_program", step=step)
        return True

    # ---- traces

    @contextmanager
    def tracing(self, step: int) -> Iterator[None]:
        """Record the actions of what runs inside, where the job asks for those of `step` (from 0)."""
        if step not in self._trace_steps:
            yield
            return
        events: list[tuple[Any, ...]] = []
        unhook = self._run.on_action(lambda *event: events.append((self._num_batches, *event)))
        try:
            yield
        finally:
            unhook()
        self._write_trace(step, events)

    def _write_trace(self, step: int, events: list[tuple[Any, ...]]) -> None:
        """Append the actions of one step, on the clock of pipeline rank 0 and relative to the attempt's start."""
        base = self._run.clock_base_ns + self._run.clock_offset_ns
        with (self._folder / "trace.jsonl").open("a") as file:
            for batch, rank, stage, chunk, op, t0, t1 in events:
                record = {"step": step, "batch": batch, "rank": rank, "stage": stage, "chunk": chunk, "op": op}
                file.write(json.dumps(record | {"start_ns": t0 - base, "end_ns": t1 - base}) + "\n")


def plan_summary(plan: Plan, compiled: Sequence[str] | None = None, *, batches: int = 1) -> dict[str, Any]:
    """Return the plan as the wire's PlanSummary says it, of steps with so many `batches`.

    `compiled`: what each stage turned out to be compiled with.
    """
    from stagekit.plan.plan import stage_output_bytes

    stages = [
        {
            "index": stage.index,
            "begins_at": stage.begins_at,
            "num_parameters": sum(_numel(p.shape) for p in stage.parameters),
            "parameter_bytes": sum(p.size_bytes for p in stage.parameters),
            "output_bytes": stage_output_bytes(plan.model, stage),
            "forward_s": stage.forward_s,
            "backward_s": stage.backward_s,
            "compile": compiled[stage.index] if compiled else plan.compile,
            "buckets": [{"size_bytes": b.size_bytes, "parameters": list(b.parameters)} for b in stage.buckets],
        }
        for stage in plan.model.stages
    ]
    return {
        "graph_hash": plan.model.graph_hash,
        "schedule": plan.schedule_name,
        "num_chunks": plan.num_chunks,
        "stages": stages,
        "expected_step_s": plan.timeline.makespan * batches,
        "expected_bubble_ratio": plan.timeline.bubble,
        "bit_equal": plan.bit_equal,
    }


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
