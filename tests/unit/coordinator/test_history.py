"""The event log as clients read it, on a real store: nothing missing, nothing twice, and no silence about what is deleted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from piped.coordinator.engine import Engine
from piped.coordinator.history import History
from piped.coordinator.store import Store
from piped.coordinator.tasks import Closing
from piped.core import events
from piped.errors import OutOfRangeError
from tests.unit.core.build import submission


@contextlib.asynccontextmanager
async def serving(
    folder: Path, opened_s: float = 5.0, max_events: int = 99, page: int = 99
) -> AsyncIterator[tuple[Engine, Store, History]]:
    store = Store(folder, max_events=max_events)
    engine = Engine(await store.open(opened_s), store)
    running = asyncio.create_task(engine.run())
    try:
        yield engine, store, History(engine, store, Closing(), page=page)
    finally:
        engine.finish()
        await running
        await store.close()


def told(records):
    return [each.name for each in records]


def test_who_follows_from_the_number_after_the_last_gets_every_event_once_also_over_a_restart(tmp_path):
    async def scenario():
        seen = []
        async with serving(tmp_path) as (engine, _, history):
            await engine.post(submission())
            following = history.follow("j1", 0)
            seen += await anext(following)
            waiting = asyncio.ensure_future(anext(following))
            await engine.post(events.HoldRequested("j1", "ann", ""))
            seen += await waiting
            await following.aclose()
        async with serving(tmp_path) as (engine, _, history):
            await engine.post(events.ReleaseRequested("j1", "ann"))
            await engine.post(events.CancelRequested("j1"))
            seen += [each async for page in history.follow("j1", seen[-1].event_seq + 1) for each in page]
        assert told(seen) == ["job_submitted", "job_waits", "job_held", "job_released", "job_waits", "job_cancelled"]

    asyncio.run(scenario())


def test_more_events_than_fit_into_a_page_come_in_several(tmp_path):
    async def scenario():
        async with serving(tmp_path, page=2) as (engine, _, history):
            await engine.post(submission())
            await engine.post(events.HoldRequested("j1", "ann", ""))
            await engine.post(events.CancelRequested("j1"))
            pages = [told(page) async for page in history.follow("j1", 0)]
            assert pages == [["job_submitted", "job_waits"], ["job_held", "job_cancelled"]]

    asyncio.run(scenario())


def test_events_that_are_too_many_or_too_old_are_deleted_and_who_asks_for_them_is_told(tmp_path):
    async def scenario():
        async with serving(tmp_path, max_events=3) as (engine, store, history):
            for number in range(5):
                await engine.post(events.ArtifactStored(f"{number}", 1))
            newest = engine.state.event_seq
            assert await store.prune(0.0) == newest - 3
            assert [each.event_seq for each in await history.page("", 0)] == [newest - 2, newest - 1, newest]
            with pytest.raises(OutOfRangeError, match=f"events up to {newest - 3} were deleted"):
                await history.page("", newest - 3)
            assert len(await history.page("", newest - 2)) == 3
            assert await history.page("", newest + 1) == []
            with pytest.raises(OutOfRangeError, match="the newest is"):
                await history.page("", newest + 2)
        async with serving(tmp_path, opened_s=4e12) as (engine, store, history):
            assert await history.page("", 0) == [], "they were older than a week when it was opened"
            with pytest.raises(OutOfRangeError):
                await history.page("", newest)

    asyncio.run(scenario())
