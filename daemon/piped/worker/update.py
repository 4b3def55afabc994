"""What a rank does with a step's gradients: unscale, clip, optimizer, scheduler.

Decides by the job's `train` what the gradients come multiplied by, and whether a step is skipped: in fp16 where a
gradient of any rank overflowed. How gradients come about is stagekit.run's. Called by piped.worker.train.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import structlog
import torch

from piped.worker.position import ALL, CLIP, Position
from stagekit.errors import UserError
from stagekit.graph.capture.precision import FP16
from stagekit.run.runtime import Run
from stagekit.run.scaler import GradScaler

log = structlog.get_logger()


class Update:
    """The optimizer side of one rank's stages; None of it where they train nothing."""

    def __init__(self, train: Mapping[str, Any], program: Any, run: Run, position: Position) -> None:
        """`train`: that section of the job. Raises UserError for what is no optimizer."""
        self._position = position
        self._run, self._limit, self._accumulate = run, train["clip_grad_norm"], int(train["accumulate"])
        parameters = [(name, p) for name, p in run.named_parameters() if p.requires_grad]
        self._optimizer: torch.optim.Optimizer | None = program.optimizer(parameters) if parameters else None
        if parameters and not isinstance(self._optimizer, torch.optim.Optimizer):
            raise UserError(f"optimizer() returned {self._optimizer!r}; return a torch.optim.Optimizer")
        has_scheduler = hasattr(program, "scheduler") and self._optimizer is not None
        self._scheduler = program.scheduler(self._optimizer) if has_scheduler else None
        self._scaler = GradScaler(run) if train["precision"] == FP16 else None

    def begin(self) -> None:
        """A step begins: its gradients are those of the mean loss of its batches, times the scale."""
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        self._run.loss_scale = scale / self._accumulate

    def apply(self, number: int) -> float:
        """Use up the gradients of step `number`; return the seconds of the optimizer and the scheduler alone."""
        if self._limit is not None:
            with self._position.inside(CLIP, ALL):
                self._unscale()
                self._run.clip_grad_norm_(self._limit)
        started = perf_counter()
        is_skipped = self._step()
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        self._run.zero_grad()  # also of what the optimizer was not given: none may be left that is summed already
        if self._scheduler is not None and not is_skipped:
            self._scheduler.step()
        if is_skipped:
            log.info("step_skipped", step=number + 1, reason="a gradient overflowed", **self.facts())
        return perf_counter() - started

    def _unscale(self) -> None:
        """Divide every gradient by the scale, those too that count in the norm and that the optimizer was not given."""
        if self._scaler is None:
            return
        self._scaler.unscale_(self._optimizer)
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        done = {id(parameter) for group in groups for parameter in group["params"]}
        for parameter in self._run.parameters():
            if parameter.grad is not None and id(parameter) not in done:
                parameter.grad.div_(self._scaler.get_scale())

    def _step(self) -> bool:
        """Step the optimizer; return whether the scaler did not let it."""
        if self._scaler is None:
            if self._optimizer is not None:
                self._optimizer.step()
            return False
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return self._scaler.get_scale() < scale

    def facts(self) -> dict[str, float]:
        """Return what the log tells of it beside the loss."""
        return {} if self._scaler is None else {"loss_scale": self._scaler.get_scale()}
