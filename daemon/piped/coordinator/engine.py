"""The single writer: inbox, decision, one transaction, then the effects. Nobody else changes the state.

Events that arrive while a transaction is being written form the next one (group commit). Readers take
`engine.state`, which is always what the disk holds. `server` runs it; `services` and `sessions` post events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from piped.core import effects as fx
from piped.core import machine
from piped.core.events import (
    BackoffEnded,
    DrainDeadlinePassed,
    Event,
    PlacementDue,
    QuarantineEnded,
    StartDeadlinePassed,
    StoreRetried,
)
from piped.core.model import Record, State
from piped.errors import BugError, PipedError, StoreRolledBack, UnavailableError

MAX_BATCH = 256
ANY_JOB = ""  # to watch: set with every line of the event log
_RETRY_S = 1.0
Deadline = StartDeadlinePassed | DrainDeadlinePassed | QuarantineEnded | BackoffEnded | StoreRetried
log = structlog.get_logger("coordinator")


class Commits(Protocol):
    """What the engine needs of a store."""

    async def commit(self, before: State, after: State, records: Iterable[Record]) -> None: ...


class Links(Protocol):
    """What the engine needs of the open node sessions. Both calls return at once."""

    def send_desired(self, node_id: str) -> None: ...

    def close_session(self, node_id: str, reason: str) -> None: ...


@dataclass(slots=True)
class _Posted:
    event: Event
    done: asyncio.Future[State]


@dataclass(slots=True)
class _Batch:
    """Decisions that one transaction makes durable."""

    state: State
    records: list[Record] = field(default_factory=list)
    effects: dict[fx.Effect, None] = field(default_factory=dict)
    accepted: list[_Posted] = field(default_factory=list)
    refused: list[tuple[_Posted, PipedError]] = field(default_factory=list)

    def keep(self, after: State, effects: Iterable[fx.Effect]) -> None:
        """Make one decision part of the transaction."""
        self.state = after
        for effect in effects:
            self.effects.pop(effect, None)  # one that comes again takes its new place: it may replace one in between
            self.effects[effect] = None
        self.records += [each.record for each in effects if isinstance(each, fx.WriteRecord)]


class Engine:
    """Owns the state. `run` is the one task that changes it."""

    def __init__(self, state: State, store: Commits) -> None:
        self.state = state
        self.links: Links | None = None  # set by the composition root before `run`
        self.is_storing = True  # False while the disk refuses commits: nothing changes, running jobs go on
        self.rolled_back = ""  # once a node has seen more than the store knows: why nothing is decided any more
        self.turned = asyncio.Event()  # set when one of the two changes; its one reader clears it
        self._store = store
        self._inbox: asyncio.Queue[_Posted | None] = asyncio.Queue()  # None: no more will come
        self._deadlines: dict[Deadline, asyncio.TimerHandle] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._has_ended = False

    async def post(self, event: Event) -> State:
        """Return the state once `event` is decided and durable. Raises what the decision raised."""
        posted = _Posted(event, asyncio.get_running_loop().create_future())
        self._inbox.put_nowait(posted)
        return await posted.done

    def post_later(self, event: Event) -> asyncio.Future[State]:
        """Post an event whose outcome nobody needs to wait for; a refusal is logged."""
        posted = _Posted(event, asyncio.get_running_loop().create_future())
        posted.done.add_done_callback(_log_refusal)
        self._inbox.put_nowait(posted)
        return posted.done

    def finish(self) -> None:
        """Let `run` return once everything posted so far is durable."""
        self._inbox.put_nowait(None)

    async def run(self) -> None:
        """Decide and store until `finish`. Begins with the effects that an earlier process left open."""
        try:
            self._perform(fx.pending(self.state, time.time()))
            is_open = True
            while is_open:
                posted = [await self._inbox.get()]
                while len(posted) < MAX_BATCH and not self._inbox.empty():
                    posted.append(self._inbox.get_nowait())
                is_open = None not in posted
                await self._take([each for each in posted if each is not None])
        finally:
            self._has_ended = True
            for timer in self._deadlines.values():
                timer.cancel()
            while not self._inbox.empty():
                if (left := self._inbox.get_nowait()) is not None:
                    _fail(left, UnavailableError("the coordinator is stopping; try again"))

    def watch(self, job_id: str) -> tuple[asyncio.Event, Callable[[], None]]:
        """Return an event that is set when the job changes (or anything, for ANY_JOB), and a function that ends the watch."""
        changed = asyncio.Event()
        self._watchers.setdefault(job_id, set()).add(changed)

        def end() -> None:
            self._watchers[job_id].discard(changed)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

        return changed, end

    def notify(self, job_id: str) -> None:
        """Wake those who watch the job; for what changes without an event, such as progress."""
        for changed in self._watchers.get(job_id, ()):
            changed.set()

    async def _take(self, posted: list[_Posted]) -> None:
        if self.rolled_back:
            for each in posted:
                _fail(each, UnavailableError(self.rolled_back))
            return
        batch = _Batch(self.state)
        for each in posted:
            _decide(batch, each)
        if fx.PlaceQueued() in batch.effects:
            _place(batch)
        try:
            if batch.state is not self.state:
                await self._store.commit(self.state, batch.state, batch.records)
                self._note_storing(True)
        except UnavailableError as error:
            self._note_storing(False)
            log.error("commit_failed", error=str(error), events=len(posted))
            for each in posted:
                _fail(each, error)
            return
        except asyncio.CancelledError:
            for each in posted:
                _fail(each, UnavailableError("the coordinator stopped before this was confirmed; ask again"))
            raise
        self.state = batch.state
        self._perform(batch.effects)
        for each in batch.accepted:
            if not each.done.done():
                each.done.set_result(self.state)
        for each, refusal in batch.refused:
            _fail(each, refusal)
            if isinstance(refusal, StoreRolledBack):
                self._note_rollback(str(refusal))

    def _note_rollback(self, why: str) -> None:
        """Decide nothing more: a fence that is given out now may be in use already."""
        self.rolled_back = why
        self.turned.set()
        log.error("store_rolled_back", error=why)

    def _note_storing(self, is_storing: bool) -> None:
        """When the disk refuses, have it tried until it takes something: an idle fleet may post nothing for hours."""
        if is_storing is not self.is_storing:
            self.is_storing = is_storing
            self.turned.set()
            if not is_storing:
                self._arm(StoreRetried(), _RETRY_S)

    def _perform(self, effects: Iterable[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.WriteRecord(record):
                    log.info(record.name, reason=record.reason, job_id=record.job_id, node=record.node_name)
                    self.notify(ANY_JOB)
                case fx.NotifyWatchers(job_id):
                    self.notify(job_id)
                case fx.PlaceQueued():
                    pass  # done before the commit
                case fx.ArmStartDeadline(fence, after_s):
                    self._arm(StartDeadlinePassed(fence), after_s)
                case fx.ArmDrainDeadline(node_id, at_s, after_s):
                    self._arm(DrainDeadlinePassed(node_id, at_s), after_s)
                case fx.ArmQuarantineEnd(node_id, at_s, after_s):
                    self._arm(QuarantineEnded(node_id, at_s), after_s)
                case fx.ArmBackoffEnd(job_id, at_s, after_s):
                    self._arm(BackoffEnded(job_id, at_s), after_s)
                case fx.SendDesired(node_id) if self.links is not None:
                    self.links.send_desired(node_id)
                case fx.CloseSession(node_id, reason) if self.links is not None:
                    self.links.close_session(node_id, reason)

    def _arm(self, event: Deadline, after_s: float) -> None:
        if event in self._deadlines:
            self._deadlines[event].cancel()

        def passed() -> None:
            del self._deadlines[event]
            self.post_later(event).add_done_callback(decided)

        def decided(done: asyncio.Future[State]) -> None:
            is_refused = not done.cancelled() and isinstance(done.exception(), UnavailableError)
            if is_refused and event not in self._deadlines and not self._has_ended:
                self._arm(event, _RETRY_S)  # the disk is full: without this there would be no deadline any more

        self._deadlines[event] = asyncio.get_running_loop().call_later(after_s, passed)


def _decide(batch: _Batch, posted: _Posted) -> None:
    try:
        after, effects, _reason = machine.apply(batch.state, posted.event, now_s=time.time())
    except BugError as error:
        log.error("bug", error=str(error), event_type=type(posted.event).__name__)
        batch.refused.append((posted, error))
        return
    except PipedError as refusal:
        batch.refused.append((posted, refusal))
        return
    batch.keep(after, effects)
    batch.accepted.append(posted)


def _place(batch: _Batch) -> None:
    after, effects, _reason = machine.apply(batch.state, PlacementDue(), now_s=time.time())
    batch.keep(after, effects)


def _fail(posted: _Posted, error: PipedError) -> None:
    if not posted.done.done():
        posted.done.set_exception(error)


def _log_refusal(done: asyncio.Future[State]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("event_refused", error=str(error))
