"""The executor: runs a rank's frozen action list. It holds no schedule logic.

Per action one small function, bound once (stagekit.run.binding); the loop calls them in order. A receive only posts;
its consumer waits. Sends of activations are reaped when their gradient arrives, others hold SEND_CREDITS credits per
channel. Called by stagekit.run.runtime (one list per rank) and by stagekit.testing (all ranks in one thread).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import monotonic_ns

import torch
from torch import Tensor

from stagekit.errors import PeerError, StageError, UserError
from stagekit.plan.actions import COMPUTE, Action, Op
from stagekit.run.binding import bind
from stagekit.run.flight import Flight, Reductions, Step, Wiring
from stagekit.run.inputs import InputExchange
from stagekit.run.layout import Placement
from stagekit.run.loss import LossRunner
from stagekit.run.stage import StageRunner
from stagekit.run.stats import Recorder
from stagekit.run.transport import BufferPool, Transport

__all__ = ["Executor", "Reductions", "Step"]

# The transfers of a compute action and their place around it.
_AROUND = {
    "F": {Op.RECV_F: 0, Op.F: 1, Op.SEND_F: 2},
    "B": {Op.RECV_B: 0, Op.B: 1, Op.I: 1, Op.SEND_B: 2, Op.W: 3},
}


class Executor:
    """One rank's stages, buffers and list. One thread; `run_list` is not reentrant."""

    def __init__(
        self,
        placement: Placement,
        actions: Sequence[Action],
        runners: Mapping[int, StageRunner],
        transport: Transport,
        inputs: InputExchange,
        loss: LossRunner | None,
        reductions: Reductions,
        device: torch.device,
    ) -> None:
        self._placement, self._runners, self._inputs = placement, runners, inputs
        self.recorder = Recorder(actions)
        self.pool = BufferPool(device)
        self.bytes: defaultdict[tuple[int, str], int] = defaultdict(int)  # (stage, direction), cumulative
        self._flight = Flight(len(self.recorder.actions))
        wiring = Wiring(
            placement,
            self.recorder,
            runners,
            transport,
            inputs,
            loss,
            reductions,
            self.pool,
            self.bytes,
            self._flight,
        )
        self._calls = [bind(wiring, index) for index in range(len(self.recorder.actions))]
        self._num_compute = sum(action.op in COMPUTE for action in self.recorder.actions)

    @property
    def step(self) -> Step:
        """The step that runs, or ran last."""
        return self._flight.step

    def outputs(self) -> list[dict[str, Tensor]]:
        """Return the last stage's outputs of every chunk by value name, where the step kept them."""
        names = self._placement.spec.stages[-1].outputs
        return [dict(zip(names, outputs, strict=True)) for outputs in self.step.outputs]

    # ---- running

    def begin(self, step: Step) -> None:
        """Prepare for `step`. The inputs were handed to the InputExchange."""
        self._flight.begin(step)
        self._performed = 0
        self.recorder.begin_step()

    def run_list(self) -> None:
        """Run the whole list. Raises StageError or PeerError."""
        started, ended, clock, index = self.recorder.start_ns, self.recorder.end_ns, monotonic_ns, 0
        with torch.set_grad_enabled(self.step.train):
            try:
                now = clock()
                for index, call in enumerate(self._calls):
                    started[index] = now
                    call()
                    ended[index] = now = clock()
            except Exception as error:
                self._fail(index, error)

    def perform(self, index: int) -> None:
        """Run action number `index`. Raises StageError or PeerError."""
        with torch.set_grad_enabled(self.step.train):
            try:
                self.recorder.start_ns[index] = monotonic_ns()
                self._calls[index]()
                self.recorder.end_ns[index] = monotonic_ns()
            except Exception as error:
                self._fail(index, error)

    def perform_chunk(self, op: str, stage: int, chunk: int) -> None:
        """Run one compute action of the list by hand, its receives before it and its sends after it.

        Input transfers run before the first, reductions after the last compute action. Raises UserError for an
        action that is not in the list.
        """
        actions = self.recorder.actions
        around = _AROUND[op]
        wanted = [i for i, a in enumerate(actions) if a.stage == stage and a.chunk == chunk and a.op in around]
        if not wanted:
            raise UserError(f"rank {self._placement.rank} has no {stage}{op}{chunk}")
        if not self._performed:
            wanted = [i for i, a in enumerate(actions) if a.op in (Op.SEND_X, Op.RECV_X)] + wanted
        for index in sorted(wanted, key=lambda i: around.get(actions[i].op, -1)):
            self.perform(index)
            self._performed += actions[index].op in COMPUTE
        if self._performed == self._num_compute:
            for index, action in enumerate(actions):
                if action.op in (Op.REDUCE, Op.TIE_SUM):
                    self.perform(index)

    def finish(self) -> None:
        """Wait for every send of the step."""
        self._flight.settle_sends()
        self._inputs.finish()

    def abort(self) -> None:
        """Forget the step after an error; buffers that a transfer may still write are not reused."""
        self._flight.drop()
        for runner in self._runners.values():
            runner.drop_all()

    def _fail(self, index: int, error: Exception) -> None:
        """Forget the step, and raise `error` with the action that it came from."""
        self.abort()
        if isinstance(error, PeerError):
            raise error
        action = self.recorder.actions[index]
        raise StageError(
            f"rank {self._placement.rank}, stage {action.stage}, chunk {action.chunk}, {action.op}: "
            f"{' '.join([f'{type(error).__name__}: {error}', *getattr(error, '__notes__', ())])}",
            rank=self._placement.rank,
            stage=action.stage,
            chunk=action.chunk,
            op=action.op,
        ) from error
