"""The loop of a forward job: batches go through the model in eval mode, outputs to the program's `collect`.

Ends when every replica's batches have ended, or after `train.steps`. A replica whose batches end earlier joins what the
others exchange, with nothing of its own. Called by piped.worker.train.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import structlog

from piped.worker.assignment import Assignment
from piped.worker.observe import Observer
from piped.worker.position import DATA, HOOK, Position
from stagekit.errors import UserError
from stagekit.load import check_batch
from stagekit.program import Batch
from stagekit.run.runtime import Run

log = structlog.get_logger()


class Scoring:
    """Batches of one rank, one after the other. `step` counts those that are done."""

    def __init__(self, job: Assignment, program: Any, run: Run, observer: Observer, position: Position) -> None:
        self._job, self._program, self._run, self._observer = job, program, run, observer
        self._position = position
        program.replica = run.replica
        self._batches: Iterator[Batch] | None = None  # on the rank of the first stage: data travels from there
        if job.pipeline_rank == 0:
            self._batches = iter(program.batches(0, run.replica, run.plan.replicas))
        self.step, self.loss = 0, float("nan")  # a loss only where batches have targets

    def run_steps(self) -> None:
        """Score until the data ends, the job's steps are done or the program's `on_step` says stop."""
        while self.step < int(self._job.spec["train"]["steps"]):
            self._position.begin_step()
            self._position.enter(DATA)
            batch = None if self._batches is None else next(self._batches, None)
            self._position.begin_batch()
            have = self._run.groups.replicas_that(batch is not None)
            if not any(have) and self.step:
                log.info("batches_ended", step=self.step)
                return
            if not all(have) and not self.step:
                raise UserError(f"batches() of replica {have.index(False)} yielded nothing; each replica needs a batch")
            metrics = self.run_step(batch, have)
            self._position.end_step()
            if self._observer.is_stopped(self._program, self.step, metrics):
                return

    def run_step(self, batch: Batch | None, have: list[bool]) -> dict[str, float]:
        """Score one batch of each replica that has one; return what `on_step` gets."""
        run, observer, number = self._run, self._observer, self.step
        started = perf_counter()
        if not have[run.replica]:
            result = run.pass_step()
        else:
            args, kwargs, target = ((), {}, None) if self._batches is None else _parts(check_batch(batch, number))
            with observer.tracing(number):
                result = run.step(*args, target=target, **kwargs)
        scored = perf_counter()
        if have[run.replica] and run.rank == run.placement.last_rank:
            with self._position.inside(HOOK):
                self._program.collect(result.output)
        self.step, self.loss = self.step + 1, result.loss
        if not have[run.replica]:
            return observer.after_pass(self.step, step_s=scored - started)
        observer.count_tokens(self._program)
        metrics = observer.after_step(
            self.step, result, step_s=scored - started, optimizer_s=0.0, num_replicas=sum(have)
        )
        if observer.is_reporter and (self.step % self._job.spec["train"]["log_every"] == 0 or self.step == 1):
            log.info("step", step=self.step, rows_per_s=round(metrics["rows_per_s"]))
        return metrics


def _parts(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return batch.args, dict(batch.kwargs), batch.target
