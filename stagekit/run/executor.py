"""The executor: runs a rank's frozen action list. It holds no schedule logic.

Per action one small function, bound once (stagekit.run.binding); the loop calls them in order. A receive only posts;
its consumer waits. Sends of activations are reaped when their gradient arrives, others hold SEND_CREDITS credits per
channel. Called by stagekit.run.runtime (one list per rank) and by stagekit.testing (all ranks in one thread).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic_ns

import torch
from torch import Tensor

from stagekit.errors import PeerError, StageError, UserError
from stagekit.plan.actions import COMPUTE, Action, Op
from stagekit.plan.contract import InputRef, ValueRef
from stagekit.run.alarm import Alarm, Silence
from stagekit.run.binding import bind, bind_drained
from stagekit.run.compute import completes
from stagekit.run.device_times import DeviceTimes
from stagekit.run.drained import send_zeros
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
        alarm: Alarm | None = None,
    ) -> None:
        """`alarm`: an error of one rank ends the step on all, see `run_list`; None: it is this rank's alone."""
        self._placement, self._runners, self._inputs = placement, runners, inputs
        self._alarm = alarm
        self.recorder = Recorder(actions)
        self.pool = BufferPool(device)
        self.bytes: defaultdict[tuple[int, str], int] = defaultdict(int)  # (stage, direction), cumulative
        self._flight = Flight(len(self.recorder.actions))
        self._wiring = wiring = Wiring(
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
        self._device_times = DeviceTimes(self.recorder) if device.type == "cuda" else None
        if self._device_times is not None:
            self._calls = [self._device_times.around(index, call) for index, call in enumerate(self._calls)]

    @property
    def step(self) -> Step:
        """The step that runs, or ran last."""
        return self._flight.step

    def outputs(self) -> list[dict[str, Tensor]]:
        """Return the last stage's outputs by value name, in the order of chunks, where the step kept them.

        A schedule may run the chunks in another order.
        """
        names = self._placement.spec.stages[-1].outputs
        return [dict(zip(names, outputs, strict=True)) for _, outputs in sorted(self.step.outputs.items())]

    # ---- running

    def begin(self, step: Step) -> None:
        """Prepare for `step`. The inputs were handed to the InputExchange."""
        self._flight.begin(step)
        self._performed: set[int] = set()  # by hand
        self.recorder.begin_step()
        self.pool.begin_step()
        if self._device_times is not None:
            self._device_times.begin()

    def read_times(self) -> None:
        """Have the recorder hold when actions ran, not when they were launched; after a step that did not fail."""
        if self._device_times is not None:
            self._device_times.read()

    def run_list(self) -> None:
        """Run the whole list. Raises PeerError; StageError only without an alarm.

        With one, an error of this rank is reported, and this rank and all that hear of it go through the rest of their
        lists without computing: everyone reaches the end of the step, where `Alarm.failure` says what to raise.
        """
        started, ended, clock, index = self.recorder.start_ns, self.recorder.end_ns, monotonic_ns, 0
        alarm = self._alarm or Silence
        with torch.set_grad_enabled(self.step.train):
            try:
                now = clock()
                for index, call in enumerate(self._calls):
                    if alarm.rang:
                        break
                    started[index] = now
                    call()
                    ended[index] = now = clock()
                else:
                    return
            except Exception as error:
                self._fail(index, error)
        self.drain(index)

    def drain(self, index: int = 0) -> None:
        """Go through the list from `index` without computing: transfers carry zeros, collectives are joined."""
        with self._draining():
            for number in range(index, len(self._calls)):
                (bind_drained(self._wiring, number) or self._calls[number])()

    def drain_rest(self) -> None:
        """Like `drain`, of what was not performed by hand, in whatever order the other ranks go: sends come first."""
        rest = [index for index in range(len(self._calls)) if index not in self._performed]
        with self._draining():
            for sends in (True, False):
                for index in rest:
                    if (self.recorder.actions[index].op in (Op.SEND_F, Op.SEND_B)) is not sends:
                        continue
                    if sends:
                        send_zeros(self._wiring, index)
                    else:
                        (bind_drained(self._wiring, index) or self._calls[index])()

    @contextmanager
    def _draining(self) -> Iterator[None]:
        """Nothing is computed inside. Raises PeerError where a transfer or a collective fails."""
        self.drop_chunks()
        self._inputs.stand_in()
        try:
            yield
        except (PeerError, RuntimeError) as error:  # of a collective that torch runs: RuntimeError
            self.abort()
            raise PeerError(f"going through the rest of a failed step: {error}") from error
        except Exception:
            self.abort()
            raise

    def perform(self, index: int) -> None:
        """Run action number `index`. Raises StageError or PeerError, on this rank alone."""
        try:
            self._perform(index)
        except Exception as error:
            self.abort()
            raise error if isinstance(error, PeerError) else self._named(index, error) from error

    def _perform(self, index: int) -> None:
        with torch.set_grad_enabled(self.step.train):
            self.recorder.start_ns[index] = monotonic_ns()
            self._calls[index]()
            self.recorder.end_ns[index] = monotonic_ns()
        self._performed.add(index)

    def perform_chunk(self, op: str, stage: int, chunk: int) -> bool:
        """Run one compute action of the list by hand, its receives before it and its sends after it.

        Input transfers run before the first, reductions after the last compute action. Return False where this rank or,
        as far as it heard, another one failed: then `drain_rest` ends the step, and `Alarm.failure` says what to raise.
        Raises PeerError; without an alarm StageError, and UserError for an action that is not in the list, or ran.
        """
        index = 0
        try:
            for index in self._indices_of(op, stage, chunk):
                if self._alarm is not None and self._alarm.rang:
                    return False
                self._perform(index)
        except UserError as error:
            self._refuse(error)
            return False
        except Exception as error:
            self._fail(index, error)
            return False
        return True

    def _indices_of(self, op: str, stage: int, chunk: int) -> Iterator[int]:
        """Yield where a compute action by hand and what goes with it are in the list; what is last depends on what ran."""
        actions, around = self.recorder.actions, _AROUND[op]
        wanted = [i for i, a in enumerate(actions) if a.stage == stage and a.chunk == chunk and a.op in around]
        if not wanted:
            raise UserError(f"{self._placement.name} has no {stage}{op}{chunk}")
        if self._performed & set(wanted):
            raise UserError(f"{self._placement.name} ran {stage}{op}{chunk} in this step already")
        forward = self._wiring.find(Op.F, stage, chunk)
        if op == "B" and forward not in self._performed:
            raise UserError(f"{self._placement.name}: run {stage}F{chunk} before its backward {stage}B{chunk}")
        self._check_sums_last(wanted, stage)
        if not self._performed:
            yield from (i for i, a in enumerate(actions) if a.op in (Op.SEND_X, Op.RECV_X))
        yield from sorted(wanted, key=lambda i: around[actions[i].op])
        if not self.left:
            yield from (i for i, a in enumerate(actions) if a.op in (Op.REDUCE, Op.TIE_SUM))

    def _check_sums_last(self, wanted: Sequence[int], stage: int) -> None:
        """Refuse the backward with which replicas sum a stage's gradients while others of the stage are left."""
        if self._placement.replica is None or not any(completes(self._wiring, index) for index in wanted):
            return
        rest = [
            str(action)
            for index, action in enumerate(self.recorder.actions)
            if action.stage == stage and action.op in (Op.B, Op.I, Op.W) and index not in self._performed | set(wanted)
        ]
        if rest:
            raise UserError(
                f"{self._placement.name}: the gradients of stage {stage} are summed over replicas with its backward of chunk "
                f"{self.recorder.actions[wanted[0]].chunk}; run it after {', '.join(rest)}"
            )

    @property
    def left(self) -> list[str]:
        """Compute actions of the step that were not performed by hand yet."""
        actions = enumerate(self.recorder.actions)
        return [str(action) for index, action in actions if action.op in COMPUTE and index not in self._performed]

    def _refuse(self, error: UserError) -> None:
        if self._alarm is None:
            self.abort()
            raise error
        self._alarm.report(error)

    def finish(self) -> None:
        """Wait for every send of the step."""
        self._flight.settle_sends()
        self._inputs.finish()

    def abort(self) -> None:
        """Forget the step after an error; buffers that a transfer may still write are not reused."""
        self._flight.drop()
        self.drop_chunks()

    def drop_chunks(self) -> None:
        """Forget every chunk between its forward and its backward."""
        for runner in self._runners.values():
            runner.drop_all()

    def _fail(self, index: int, error: Exception) -> None:
        """Report `error` with the action that it came from; without anyone to report to, forget the step and raise it."""
        if isinstance(error, PeerError):
            self.abort()
            raise error
        failed = self._named(index, error)
        if self._alarm is None:
            self.abort()
            raise failed from error
        failed.__cause__ = error
        self._alarm.report(failed)

    def _named(self, index: int, error: Exception) -> StageError:
        action = self.recorder.actions[index]
        told = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return StageError(
            f"{self._placement.name}, stage {action.stage}, chunk {action.chunk}, {action.op}: {told}"
            f"{self._inputs_of(action)}",
            rank=self._placement.global_rank_of(self._placement.rank),
            stage=action.stage,
            chunk=action.chunk,
            op=action.op,
        )

    def _inputs_of(self, action: Action) -> str:
        """Return the shapes that a compute action's stage was given, for people; nothing for other actions."""
        if action.op not in COMPUTE:
            return ""
        layouts, parts = self._flight.shapes[action.chunk].edges, self._inputs.parts
        shapes = []
        for ref in self._placement.spec.stages[action.stage].inputs:
            if isinstance(ref, ValueRef):
                shape, _, dtype = layouts[ref.value]
            elif isinstance(ref, InputRef) and (cut := parts[ref.index]) and isinstance(cut[action.chunk], Tensor):
                shape, dtype = tuple(cut[action.chunk].shape), cut[action.chunk].dtype
            else:
                continue
            shapes.append(f"{list(shape)} {str(dtype).removeprefix('torch.')}")
        return f" (inputs: {', '.join(shapes)})" if shapes else ""
