"""Where this rank is in its loop, told once a second by a thread: what hangs are judged by.

The loop writes (`enter`, and the executor its times of actions), the thread only reads, so that a step costs nothing more.
What it tells is since when the loop has not moved, not that the process lives; a process that is stopped, or never lets
go of the interpreter, tells nothing, and that is heard too. Made by piped.worker.train.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, monotonic_ns
from typing import Any

from piped.worker.link import Link
from stagekit.plan.actions import COMPUTE, SENDS, Action, Op
from stagekit.run.runtime import Run
from stagekit.run.stats import Recorder

EVERY_S = 1.0
KEPT_STEPS = 100
FIRST_STEP, STEP, UPDATE, CLIP = "first step", "step", "update", "clip"
COMPILED_STEP = "compiled step"
DATA, EVAL, HOOK, SAVE = "data", "eval", "hook", "save"
_WITH_ACTIONS = (FIRST_STEP, STEP, COMPILED_STEP, EVAL)
# What a computation waits for before it begins; a backward also for its forward's send, to the rank that the gradient is from.
_AWAITED = {Op.F: (Op.RECV_F, Op.RECV_X), Op.B: (Op.RECV_B,), Op.I: (Op.RECV_B,)}

Waiting = Sequence[int] | str  # ranks, or ALL
ALL = "all"


class Position:
    """The section of the loop and what it does there. The training thread alone calls what is public."""

    def __init__(self, link: Link, run: Run) -> None:
        self._link, self._run = link, run
        self.step = 0  # finished
        self._began_s = monotonic()
        self._durations: deque[float] = deque(maxlen=KEPT_STEPS)
        self._first_s = 0.0
        self._here: tuple[str, int, Waiting] = (FIRST_STEP, monotonic_ns(), ())
        self._age_s, self._looked_s = 0.0, monotonic()
        self._last: tuple[object, ...] = ()
        self._ended = threading.Event()
        threading.Thread(target=self._tell, name="position", daemon=True).start()

    def enter(self, section: str, waiting_on: Waiting = ()) -> None:
        """The loop comes to another section, or to the same one again; in it, it waits for these ranks of the world."""
        self._here = (section, monotonic_ns(), waiting_on)

    @contextmanager
    def inside(self, section: str, waiting_on: Waiting = ()) -> Iterator[None]:
        """The loop is in `section` inside, and back where it was after it."""
        before, _, awaited = self._here
        self.enter(section, waiting_on)
        yield
        self.enter(before, awaited)

    def begin_batch(self) -> None:
        """Ranks open a batch together: the first rank of a pipeline tells the others what is in it."""
        is_eager = all(backend == "eager" for backend in self._run.compiled.values())
        section = (STEP if is_eager else COMPILED_STEP) if self.step else FIRST_STEP
        self.enter(section, self._openers())

    def begin_step(self) -> None:
        """A step begins."""
        self._began_s = monotonic()

    def end_step(self) -> None:
        """A step is over; how long the first one took counts until there is another one."""
        took_s = monotonic() - self._began_s
        if self.step:
            self._durations.append(took_s)
        else:
            self._first_s = took_s
        self.step += 1

    def close(self) -> None:
        """Tell nothing any more."""
        self._ended.set()

    # ---- in the thread

    def _tell(self) -> None:
        while not self._ended.is_set():
            self._link.send("beat", **self.look())
            self._ended.wait(EVERY_S)

    def look(self) -> dict[str, Any]:
        """Return where the loop is, as a `beat` says it. A pause of the whole machine does not count as standing still."""
        section, entered_ns, waiting_on = self._here
        action, recorder = "", self._recorder(entered_ns)
        moved: tuple[object, ...] = (entered_ns,)
        if recorder is not None:
            index = _newest(recorder)
            moved += (recorder.step_start_ns, recorder.start_ns[index], recorder.end_ns[index], index)
            if section in _WITH_ACTIONS:
                action, waiting_on = self._at(recorder, index)
        now_s = monotonic()
        passed_s = min(now_s - self._looked_s, 2 * EVERY_S)
        self._age_s = self._age_s + passed_s if moved == self._last else 0.0
        self._last, self._looked_s = moved, now_s
        told = waiting_on if isinstance(waiting_on, str) else list(waiting_on)
        longest_s = max(tuple(self._durations), default=self._first_s)
        fields = {"step": self.step, "section": section, "action": action, "waiting_on": told}
        return fields | {"age_s": self._age_s, "longest_step_s": longest_s}

    def _recorder(self, entered_ns: int) -> Recorder | None:
        """Return that of the list that runs, or ran last, since the loop came to its section."""
        begun = [each for each in self._run.recorders if each.actions and each.step_start_ns >= entered_ns]
        return max(begun, key=lambda each: each.step_start_ns, default=None)

    def _at(self, recorder: Recorder, index: int) -> tuple[str, Waiting]:
        """Return the action that runs and the ranks that it waits for."""
        action, start_ns, end_ns = recorder.actions[index], recorder.start_ns, recorder.end_ns
        if start_ns[index] < recorder.step_start_ns:
            return "", ()  # about to begin
        if end_ns[index] >= start_ns[index]:
            is_over = index == len(recorder.actions) - 1
            return "", (self._status() if is_over else ())
        if action.op in SENDS and action.peer is not None:
            return str(action), self._world([self._run.plan.stage_ranks[action.peer]])
        if action.op is Op.REDUCE:
            return str(action), self._replicas()
        if action.op is Op.TIE_SUM:
            return str(action), ALL
        if action.op in COMPUTE and index and start_ns[index] == end_ns[index - 1]:  # else it has begun to compute
            return str(action), self._world(self._sources(recorder, action))
        return str(action), (self._replicas() if self._run.meets_replicas else ())

    def _sources(self, recorder: Recorder, action: Action) -> list[int]:
        """Return the pipeline ranks that send what a computation waits for."""
        ranks, awaited = self._run.plan.stage_ranks, _AWAITED.get(action.op, ())
        sends = (
            each.peer
            for each in recorder.actions
            if each.op in awaited and each.stage == action.stage and each.chunk in (action.chunk, 0)
            if each.chunk == action.chunk or each.op is Op.RECV_X
        )
        return sorted({ranks[peer] for peer in sends if peer is not None})

    def _openers(self) -> Waiting:
        """Return whom a rank waits for before a batch: the first rank of its pipeline, and that one for the replicas'."""
        if self._run.rank:
            return self._world([0])
        return self._replicas()

    def _status(self) -> Waiting:
        """Return whom a rank waits for at the end of a step, where the first rank adds up the losses of all."""
        is_led = self._run.rank and self._run.plan.replicas == 1
        return self._world([0]) if is_led else ALL

    def _world(self, pipeline_ranks: Sequence[int]) -> Waiting:
        first = self._run.replica * self._run.plan.num_ranks
        return [first + rank for rank in pipeline_ranks if rank != self._run.rank]

    def _replicas(self) -> Waiting:
        run = self._run
        return [
            replica * run.plan.num_ranks + run.rank for replica in range(run.plan.replicas) if replica != run.replica
        ]


def _newest(recorder: Recorder) -> int:
    """Return the action that began last."""
    starts = recorder.start_ns
    return max(range(len(starts)), key=starts.__getitem__)
