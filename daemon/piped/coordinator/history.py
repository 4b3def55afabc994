"""The event log as clients read it: in pages, or followed from an event number on, without a gap and nothing twice.

What is older than `store.EVENTS_KEPT_S`, or beyond `store.MAX_EVENTS`, is deleted; who asks for what was deleted is told,
since an answer without it would look whole. Called by `services`; `server` runs `prune`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import structlog

from piped.coordinator.engine import ANY_JOB, Engine
from piped.coordinator.store import Store
from piped.coordinator.tasks import Closing
from piped.core.model import Record
from piped.errors import OutOfRangeError, UnavailableError

PAGE = 1000  # events per message
FOLLOW_INTERVAL_S = 0.25  # at most one look into the store per watch in that time
PRUNE_EVERY_S = 3600.0
log = structlog.get_logger("coordinator")


class History:
    """Reads the log, and shortens it."""

    def __init__(self, engine: Engine, store: Store, closing: Closing, *, page: int = PAGE) -> None:
        self._engine, self._store, self._closing, self._page = engine, store, closing, page

    async def page(self, job_id: str, from_event_seq: int) -> list[Record]:
        """Return the next events of the job, or of all for an empty id; from 0 on means from the oldest kept.

        Raises OutOfRangeError for events that were deleted, or that no event before has announced.
        """
        newest = self._engine.state.event_seq
        if from_event_seq > newest + 1:
            raise OutOfRangeError(
                f"event {from_event_seq} is far from written: the newest is {newest}; is this another store than the one "
                "that the number comes from? Begin again at 0"
            )
        records = await self._store.events(job_id, from_event_seq, self._page)
        pruned = self._store.pruned_event_seq
        if 0 < from_event_seq <= pruned:
            raise OutOfRangeError(
                f"events up to {pruned} were deleted, {from_event_seq} among them; begin again at {pruned + 1}, or at 0"
            )
        return records

    async def follow(self, job_id: str, from_event_seq: int) -> AsyncIterator[list[Record]]:
        """Yield events as they come, never an empty list; with a job, until that has ended and nothing of it is left."""
        changed, end = self._engine.watch(job_id or ANY_JOB)
        try:
            while True:
                changed.clear()
                is_over = self._is_over(job_id)
                if records := await self.page(job_id, from_event_seq):
                    yield records
                    from_event_seq = records[-1].event_seq + 1
                if len(records) == self._page:
                    continue
                if is_over:
                    return
                await self._closing.race(changed.wait())
                await self._closing.race(asyncio.sleep(FOLLOW_INTERVAL_S))
        finally:
            end()

    async def prune(self) -> None:
        """Delete old events every hour, until cancelled."""
        while True:
            await asyncio.sleep(PRUNE_EVERY_S)
            try:
                if count := await self._store.prune(time.time()):
                    log.info("events_pruned", events=count, up_to=self._store.pruned_event_seq)
            except UnavailableError as error:
                log.warning("prune_failed", error=str(error))

    def _is_over(self, job_id: str) -> bool:
        state = self._engine.state
        if not job_id or not state.jobs[job_id].is_terminal:
            return False
        attempt = state.attempts.get(state.jobs[job_id].fence)
        return attempt is None or attempt.is_terminal
