"""The single writer: order, group commit, refusal, a disk that is full."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from piped.coordinator.engine import Engine
from piped.core import events
from piped.core.model import JobState, State
from piped.errors import ConflictError, UnavailableError
from tests.unit.core.build import registration, submission


class Disk:
    """Keeps what is committed; can be full."""

    def __init__(self) -> None:
        self.state = State("c1", epoch=1)
        self.num_commits = 0
        self.is_full = False

    async def commit(self, before, after, records):
        await asyncio.sleep(0)
        if self.is_full:
            raise UnavailableError("the disk is full")
        assert before is self.state
        self.state, self.num_commits = after, self.num_commits + 1


class Wire:
    """Notes what was sent, and what was durable then."""

    def __init__(self, disk: Disk) -> None:
        self.disk, self.sent = disk, []

    def send_desired(self, node_id):
        self.sent.append((node_id, dict(self.disk.state.reservations)))

    def close_session(self, node_id, reason):
        self.sent.append((node_id, reason))


@contextlib.asynccontextmanager
async def running():
    disk = Disk()
    engine = Engine(disk.state, disk)
    engine.links = Wire(disk)
    task = asyncio.create_task(engine.run())
    try:
        yield engine, disk
    finally:
        engine.finish()
        await task


def test_a_node_hears_of_a_decision_only_when_it_is_durable():
    async def scenario():
        async with running() as (engine, _disk):
            await engine.post(registration("n1"))
            await engine.post(submission())
            assert engine.links.sent[-1] == ("n1", {("n1", 0): 1, ("n1", 1): 1})

    asyncio.run(scenario())


def test_events_that_arrive_together_share_a_commit():
    async def scenario():
        async with running() as (engine, disk):
            await asyncio.gather(*(engine.post(submission(f"j{each}", name=f"n{each}")) for each in range(50)))
            assert len(disk.state.jobs) == 50
            assert disk.num_commits <= 2

    asyncio.run(scenario())


def test_a_full_disk_refuses_everything_and_changes_nothing_until_it_has_room():
    async def scenario():
        async with running() as (engine, disk):
            disk.is_full = True
            for _ in range(2):
                with pytest.raises(UnavailableError):
                    await engine.post(submission())
            assert not engine.state.jobs
            assert not engine.is_storing
            disk.is_full = False
            await engine.post(submission())
            assert (list(disk.state.jobs), engine.is_storing) == (["j1"], True)

    asyncio.run(scenario())


def test_a_refusal_reaches_the_one_who_asked():
    async def scenario():
        async with running() as (engine, _disk):
            await engine.post(submission())
            with pytest.raises(ConflictError):
                await engine.post(submission("j2"))

    asyncio.run(scenario())


def test_the_start_deadline_comes_back_as_an_event():
    async def scenario():
        async with running() as (engine, _disk):
            changed, end = engine.watch("j1")
            await engine.post(registration("n1"))
            await engine.post(submission(start_timeout_s=0.05))
            while not engine.state.attempts[1].stop_trigger:
                changed.clear()
                await asyncio.wait_for(changed.wait(), 5)
            end()
            assert engine.state.attempts[1].stop_trigger == "not prepared within 0.05 s (recovery.start_timeout): n1"

    asyncio.run(scenario())


def test_a_start_deadline_that_a_full_disk_refused_comes_again():
    async def scenario():
        async with running() as (engine, disk):
            await engine.post(registration("n1"))
            await engine.post(submission(start_timeout_s=0.05))
            disk.is_full = True
            await until(lambda: not engine.is_storing)
            assert not engine.state.attempts[1].stop_trigger
            disk.is_full = False
            await until(lambda: engine.state.attempts[1].stop_trigger)

    asyncio.run(scenario())


def test_a_disk_that_has_room_again_is_found_out_though_nobody_asks_for_anything():
    async def scenario():
        async with running() as (engine, disk):
            disk.is_full = True
            with pytest.raises(UnavailableError):
                await engine.post(submission())
            disk.is_full = False
            await until(lambda: engine.is_storing)
            assert disk.num_commits == 1

    asyncio.run(scenario())


def test_a_refusal_that_writes_nothing_is_no_sign_of_a_disk_with_room():
    async def scenario():
        async with running() as (engine, disk):
            await engine.post(submission())
            disk.is_full = True
            with pytest.raises(UnavailableError):
                await engine.post(submission("j2", name="second"))
            with pytest.raises(ConflictError):
                await engine.post(submission("j3"))
            assert not engine.is_storing

    asyncio.run(scenario())


async def until(condition):
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)


def test_what_is_posted_before_the_end_is_durable_at_the_end():
    async def scenario():
        async with running() as (engine, disk):
            await engine.post(registration("n1"))
            engine.post_later(events.NodeDisconnected("n1", 0))
        assert disk.state.nodes["n1"].state.value == "disconnected"

    asyncio.run(scenario())


def test_of_several_drains_in_one_transaction_the_last_ones_deadline_counts(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)  # a clock that tells them not apart

    async def scenario():
        async with running() as (engine, _disk):
            await engine.post(registration("n1", 1))
            await engine.post(submission(stages=1))
            await engine.post(events.AttemptPrepared("n1", 1))
            changed, end = engine.watch("j1")
            drains = (events.DrainRequested("n1", "ann", "", within_s) for within_s in (0.01, 3600.0, 0.01))
            await asyncio.gather(*(engine.post(each) for each in drains))
            async with asyncio.timeout(20):
                while engine.state.jobs["j1"].state is not JobState.PREEMPTING:
                    changed.clear()
                    await changed.wait()
            end()

    asyncio.run(scenario())
