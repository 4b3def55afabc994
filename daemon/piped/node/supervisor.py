"""The attempts of this node: performs what reconcile decides and feeds it what is observed.

Owns one task per attempt with a live or coming shim: prepare, launch, connect, listen, and after the shim's end sweep
and read its records. Shims and workers outlive it. Built and run by piped.node.app; all methods run on its loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any, Protocol

import structlog

from piped.node import reconcile
from piped.node.attempt import Attempt, Meter
from piped.node.attempt_dir import AttemptDir, kill_marked, list_attempts, remove_old
from piped.node.facts import FactBook
from piped.node.model import (
    Abandon,
    Action,
    DesiredAttempt,
    DesiredState,
    Dismiss,
    FactKey,
    Observed,
    PassEndpoint,
    Prepare,
    Report,
    Shim,
    StartRanks,
    StopRanks,
)
from piped.node.orders import Place
from piped.node.preflight import PreflightError
from piped.node.prepare import Preparation
from piped.node.shim_link import ShimGone, ShimLink, launch
from piped.node.state import StateDir

log = structlog.get_logger()

# Note [one attempt's trouble]: whatever goes wrong in an attempt, foreseen or not, ends at that attempt's edge: refused
# while it has not begun, else logged and tried again. The daemon serves all the others too, and a daemon that starts
# again would meet the same trouble again. CancelledError is no Exception and passes.

_RECONNECT_S = 0.1
_SWEEP_S = 0.05


class JobMeter(Meter, Protocol):
    """What the supervisor tells piped.node.metrics."""

    def follow(self, desired: DesiredState, node_id: str) -> None:
        """Take note of the jobs that are wanted here."""

    def end_attempt(self, job_id: str, fence: int) -> None:
        """Nothing of the attempt runs here any more."""


class Supervisor:
    """All attempts of this node."""

    def __init__(
        self,
        state: StateDir,
        place: Place,
        book: FactBook,
        meter: JobMeter,
        preparation: Preparation,
        *,
        base_env: Mapping[str, str],
        keep_attempts: int,
    ) -> None:
        self.desired: DesiredState | None = None
        self._state = state
        self._place = place
        self._book = book
        self._meter = meter
        self._preparation = preparation
        self._base_env = base_env
        self._keep_attempts = keep_attempts
        self._attempts: dict[int, Attempt] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._is_leaving = False

    async def run(self) -> None:
        """Re-adopt what is on disk, then reconcile whenever something changed, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._reconcile()

    def adopt(self) -> None:
        """Take over every attempt on disk that is not closed; call once, before `run` and the first session."""
        for directory in list_attempts(self._state.attempts):
            if directory.is_closed:
                continue
            attempt = self._attempts[directory.fence] = Attempt(directory, directory.job_id, self._book, self._meter)
            try:
                self._adopt(attempt)
            except Exception:  # damaged: the others are taken over all the same
                log.exception("adoption_trouble", fence=attempt.fence, job_id=attempt.job_id)
        self._changed.set()

    @staticmethod
    def _adopt(attempt: Attempt) -> None:
        directory = attempt.directory
        if directory.had_shim:
            attempt.shim, attempt.is_launching = Shim.STARTING, True
            log.info("attempt_adopted", fence=attempt.fence, job_id=attempt.job_id)
            attempt.read_records()
        else:  # a shim that an earlier daemon launched just before its end leaves no trace yet
            kill_marked(directory.marker)
        if (error := directory.preparation_error) is not None:
            attempt.preparation_failed = True
            attempt.report(None, "prepare_failed", {"message": error})

    # --- what the session asks

    def want(self, desired: DesiredState) -> None:
        """Take a new desired state."""
        self.desired, reason = reconcile.accept(self.desired, desired)
        if self.desired is desired:
            self._meter.follow(desired, self._place.node_id)
        log.debug("desired", reason=reason)
        self._changed.set()

    def acknowledge(self, keys: Iterable[FactKey]) -> None:
        """Take the coordinator's acknowledgements; shims may forget what it holds."""
        for key in self._book.acknowledge(keys):
            if attempt := self._attempts.get(key[0]):
                attempt.acknowledge(key)
        self._changed.set()

    def observed(self) -> dict[int, Observed]:
        """Return every attempt that is not closed."""
        return {fence: attempt.observed() for fence, attempt in self._attempts.items()}

    def progress(self) -> Iterator[tuple[int, int, dict[str, Any], float]]:
        """Yield (fence, rank, progress, seconds for which it has said nothing) of every running rank."""
        for fence, attempt in self._attempts.items():
            for rank, silent_s in attempt.silences():
                yield fence, rank, attempt.progress.get(rank, {}), silent_s

    async def stop_all(self, grace_s: float) -> None:
        """Stop every worker and wait until its shim left; for a daemon that takes its workers with it."""
        self._is_leaving = True
        while live := [a for a in self._attempts.values() if a.shim in (Shim.STARTING, Shim.CONNECTED)]:
            for attempt in live:
                if not attempt.is_launching and attempt.fence in self._tasks:
                    self._tasks[attempt.fence].cancel()
                elif attempt.shim is Shim.CONNECTED and attempt.told_grace_s is None:
                    attempt.stop(grace_s)
                elif attempt.started <= attempt.exited:
                    for rank in attempt.exited:  # acknowledged for the coordinator: the record is on disk
                        attempt.acknowledge((attempt.fence, rank, "exited"))
                    attempt.dismiss()
            await asyncio.sleep(_SWEEP_S)

    # --- what is done

    def _reconcile(self) -> None:
        for fence, attempt in self._attempts.items():
            if attempt.shim is Shim.STARTING and fence not in self._tasks:
                self._spawn(fence, self._serve(attempt))
        for action in reconcile.reconcile(self.desired, self.observed(), self._place.node_id):
            try:
                self._perform(action)
            except Exception as error:  # Note [one attempt's trouble]
                self._trouble(action, error)
        self._close_finished()

    def _trouble(self, action: Action, error: Exception) -> None:
        """An action failed: what was to begin is refused, and all else is asked for again."""
        log.error("action_failed", action=type(action).__name__, error=repr(error), exc_info=error)
        if isinstance(action, (Prepare, StartRanks)) and (attempt := self._attempts.get(action.desired.fence)):
            self._refuse(attempt, _said(error))

    def _perform(self, action: Action) -> None:
        match action:
            case Prepare() | StartRanks() if self._is_leaving:
                pass
            case Prepare(desired):
                self._begin(desired)
            case Abandon(fence):
                if not self._attempts[fence].is_launching and fence in self._tasks:
                    self._tasks[fence].cancel()
            case StartRanks(desired, ranks):
                self._attempts[desired.fence].start_ranks(desired, ranks, self._place)
            case PassEndpoint(fence, ranks, endpoint):
                self._attempts[fence].pass_endpoint(ranks, endpoint)
            case StopRanks(fence, grace_s, trigger, dumps_stacks):
                log.info("attempt_stopping", fence=fence, grace_s=grace_s, trigger=trigger)
                self._attempts[fence].stop(grace_s, dumps_stacks=dumps_stacks)
            case Dismiss(fence):
                self._attempts[fence].dismiss()
            case Report(fence, rank, kind):
                self._report(fence, rank, kind)

    def _report(self, fence: int, rank: int | None, kind: str) -> None:
        attempt = self._attempts.get(fence)
        if attempt is None:  # never seen here: remember, so that its preparation can't begin later
            wanted = next(a for a in self.desired.attempts if a.fence == fence) if self.desired else None
            directory = AttemptDir(self._state.attempts / str(fence), fence)
            attempt = self._attempts[fence] = Attempt(
                directory, wanted.job_id if wanted else "", self._book, self._meter
            )
        attempt.report(rank, kind)
        if kind == "attempt_empty":
            self._meter.end_attempt(attempt.job_id, fence)

    def _begin(self, desired: DesiredAttempt) -> None:
        fence = desired.fence
        directory = AttemptDir(self._state.attempts / str(fence), fence)
        attempt = self._attempts[fence] = Attempt(directory, desired.job_id, self._book, self._meter)
        attempt.shim = Shim.STARTING
        self._spawn(fence, self._prepare(attempt, desired))

    def _spawn(self, fence: int, work: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None
        task = self._tasks[fence] = self._group.create_task(work, name=f"attempt-{fence}")
        task.add_done_callback(lambda _: self._ended(fence))

    def _ended(self, fence: int) -> None:
        self._tasks.pop(fence, None)
        attempt = self._attempts.get(fence)
        if attempt is not None and attempt.shim is Shim.STARTING and attempt.process is None:
            attempt.shim = Shim.NEVER  # abandoned before there was a shim
        self._changed.set()

    # --- one attempt's task

    async def _prepare(self, attempt: Attempt, desired: DesiredAttempt) -> None:
        try:
            await asyncio.to_thread(self._state.remember, fence=attempt.fence)
            await asyncio.to_thread(AttemptDir.create, self._state.attempts, attempt.fence, attempt.job_id)
            await self._preparation.prepare(desired, attempt.directory)
            attempt.starts(desired, desired.ranks_on(self._place.node_id), self._place)  # can it be told?
            attempt.is_launching = True
            attempt.process = await asyncio.to_thread(launch, attempt.directory, self._base_env)
        except Exception as error:  # Note [one attempt's trouble]
            if not isinstance(error, (PreflightError, OSError)):
                log.error("preparation_trouble", fence=attempt.fence, error=repr(error), exc_info=error)
            self._refuse(attempt, _said(error), **_blame(error))
            return
        await self._serve(attempt)

    async def _serve(self, attempt: Attempt) -> None:
        was_connected = attempt.process is None  # adopted: it was, in the life of an earlier daemon
        while True:
            try:
                link = await ShimLink.connect(attempt.directory, attempt.process)
            except ShimGone as error:
                if not was_connected:
                    self._refuse(attempt, f"the shim did not start: {error}")
                break
            except Exception as error:  # it hangs; an attempt never gets a second one, so go on trying
                log.warning("shim_unreachable", fence=attempt.fence, error=repr(error))
                await asyncio.sleep(_RECONNECT_S)
                continue
            was_connected = True
            try:
                await self._listen(attempt, link)
            except Exception as error:  # Note [one attempt's trouble]
                log.error("shim_link_trouble", fence=attempt.fence, error=repr(error), exc_info=error)
                await asyncio.sleep(_RECONNECT_S)
            finally:
                attempt.disconnected()
                await link.close()
        await self._bury(attempt)

    async def _listen(self, attempt: Attempt, link: ShimLink) -> None:
        attempt.connected(link)
        async for message in link.messages():
            try:
                if attempt.take(message):
                    self._changed.set()
            except Exception as error:  # Note [one attempt's trouble]
                log.error("message_malformed", fence=attempt.fence, error=repr(error), line=str(message)[:200])

    async def _bury(self, attempt: Attempt) -> None:
        """After a shim's end: no process of it may be left, and what its records say is reported."""
        num_left = 1
        while num_left:
            num_left = await self._sweep(attempt)
            await asyncio.sleep(_SWEEP_S if num_left else 0)
        if attempt.process is not None:
            attempt.process.poll()
        try:
            attempt.read_records()
        except Exception:  # Note [one attempt's trouble]: without its records its ranks count as lost
            log.exception("records_unreadable", fence=attempt.fence, job_id=attempt.job_id)
        attempt.forget_ranks()
        attempt.shim = Shim.GONE
        log.info("shim_gone", fence=attempt.fence, job_id=attempt.job_id)

    async def _sweep(self, attempt: Attempt) -> int:
        """Kill what is left of the attempt; return how many there were, or 1 when that can't be told yet."""
        try:
            return await asyncio.to_thread(kill_marked, attempt.directory.marker)
        except OSError as error:  # /proc can't be read, e.g. for want of descriptors
            log.warning("sweep_failed", fence=attempt.fence, error=str(error))
            await asyncio.sleep(_RECONNECT_S)
            return 1

    def _refuse(self, attempt: Attempt, message: str, **blame: bool | str) -> None:
        attempt.preparation_failed = True
        attempt.directory.note_preparation_error(message)
        attempt.report(None, "prepare_failed", {"message": message, **blame})
        if not attempt.is_launching:
            attempt.shim = Shim.NEVER
        self._changed.set()

    def _close_finished(self) -> None:
        """Close attempts that nobody wants any more and whose facts are all with the coordinator."""
        wanted = {attempt.fence for attempt in self.desired.attempts} if self.desired else set(self._attempts)
        over = (Shim.NEVER, Shim.GONE)
        finished = [
            attempt
            for fence, attempt in self._attempts.items()
            if fence not in wanted and attempt.shim in over and not self._book.has_open(fence)
        ]
        for attempt in finished:
            attempt.directory.close()
            del self._attempts[attempt.fence]
            self._book.forget(attempt.fence)
            self._meter.end_attempt(attempt.job_id, attempt.fence)
            log.info("attempt_closed", fence=attempt.fence, job_id=attempt.job_id)
        if finished and self._group is not None:
            self._group.create_task(self._remove_old(), name="remove-old-attempts")

    async def _remove_old(self) -> None:
        try:
            await asyncio.to_thread(remove_old, self._state.attempts, self._keep_attempts)
        except OSError as error:  # tried again when the next attempt is closed
            log.warning("old_attempts_stay", error=str(error))


def _said(error: Exception) -> str:
    """Return the text for the submitter: an error that nobody foresaw says its kind too."""
    return str(error) if isinstance(error, (PreflightError, OSError)) else f"{type(error).__name__}: {error}"


def _blame(error: Exception) -> dict[str, bool | str]:
    """Return who is to blame for a refusal, as prepare_failed says it; the disk and the like are the node's."""
    if isinstance(error, PreflightError):
        return {"node_fault": error.is_nodes, "peer_node_id": error.peer_id}
    return {"node_fault": isinstance(error, OSError)}
