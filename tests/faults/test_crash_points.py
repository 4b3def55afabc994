"""SIGKILL of the coordinator at each statement of its store while a job fails, is restarted and succeeds, and another is cancelled.

Bounds, whichever statement it was: who got an answer gets the same one again, no acknowledged job is lost, no rank is started twice,
the file that is left holds every invariant, and both jobs end as they would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from pipeapi.v1 import jobs_pb2
from piped.coordinator.store import Store
from piped.core.model import State
from tests.integration.coordinator.scripted import Client, ScriptedNode, spec, until
from tests.support.crashing import Launcher

T = TypeVar("T")
EVERY = 8  # of the statements, one in so many is run by `make test`; all are by `make soak`
SIDE_BY_SIDE = 2


class Mortal:
    """A coordinator that dies once, at statement `at` of its store, and is started again at once."""

    def __init__(self, folder: Path, launcher: Launcher, at: int) -> None:
        self.state_dir, self.log, self.died = folder / "state", folder / "log", folder / "died"
        self.address, self.was_killed = "127.0.0.1:0", False
        self.left: State | None = None  # what the death left on the disk
        self.promised: list[
            tuple[str, tuple[str, ...]]
        ] = []  # of a job that the first life has answered for: its states
        self._folder, self._launcher, self._at = folder, launcher, at
        self._serving = 0  # the pid that serves and was not told to stop

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Mortal]:
        """Keep it running; inside it is stopped in order at the end, unless the block failed."""
        keeping = asyncio.create_task(self._keep())
        try:
            await until(lambda: self.address[-2:] != ":0" or keeping.done(), f"it serves: {self._read(self.log)}")
            yield self
            await until(lambda: self._is_stopped(keeping), "it stops")
            assert await keeping == 0, self._read(self.log)
        finally:
            self._launcher.kill()
            await asyncio.gather(keeping, return_exceptions=True)

    async def asked(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        """Return the answer, asking again for as long as there is nobody to answer."""
        answers: list[T] = []

        async def is_answered() -> bool:
            client = Client(self.address)
            try:
                answers.append(await ask(client))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            finally:
                await client.channel.close()
            return bool(answers)

        await until(is_answered, "an answer")
        return answers[0]

    def _is_stopped(self, keeping: asyncio.Task[int]) -> bool:
        """Tell whichever life serves to stop, once: the first may die of its last statement, and another comes."""
        if self._serving and self._serving == self._launcher.pid:
            self._launcher.kill(signal.SIGTERM)
            self._serving = 0
        return keeping.done()

    def promise(self, job_id: str, *states: str) -> None:
        """Note which states the job can be in from now on; only what is answered before the death counts."""
        if not self.was_killed:
            self.promised.append((job_id, states))

    async def _keep(self) -> int:
        """Start it, and once more if it was killed; return how it ended."""
        for at in (self._at, 0):
            status = await self._live(at)
            if status != -signal.SIGKILL:
                return status
            self.was_killed = True
            self.left = await read_copy(self.state_dir, self._folder / "copy")
        return status

    async def _live(self, at: int) -> int:
        flags = ("listen", self.address), ("http", "127.0.0.1:0"), ("health", "127.0.0.1:0"), ("beat-s", "0.2")
        arguments = [f"--{name}={text}" for name, text in (("state-dir", self.state_dir), *flags, ("lease-ttl-s", 2))]
        await self._launcher.spawn(
            {"arguments": ["coordinator", *arguments], "log": str(self.log), "died": str(self.died), "at": at}
        )
        ending = asyncio.create_task(self._launcher.wait())
        pid, endpoints = self._launcher.pid, self.state_dir / "endpoints.json"
        await until(lambda: ending.done() or f'"pid": {pid}}}' in self._read(endpoints), "it serves or has ended")
        if text := self._read(endpoints):
            self.address, self._serving = json.loads(text)["grpc"], pid
        return await ending

    @staticmethod
    def _read(path: Path) -> str:
        return path.read_text() if path.exists() else ""


async def read_copy(state_dir: Path, copy: Path) -> State:
    """Return what a store holds, checked in every way. The original is left as it is."""
    shutil.copytree(state_dir, copy, ignore=shutil.ignore_patterns("*-shm"))  # which is made anew from the log
    with contextlib.closing(sqlite3.connect(copy / "coordinator.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    store = Store(copy)
    try:
        return await store.open(0.0)  # raises what the invariants are broken by
    finally:
        await store.close()


async def play(folder: Path, launcher: Launcher, at: int) -> Mortal:
    """Submit, let it fail once and then succeed, submit, cancel; with the coordinator killed at statement `at` of all this."""
    async with Mortal(folder, launcher, at).running() as coordinator:
        node = ScriptedNode(coordinator.address, "n1")
        async with node.running():
            first = await submit(coordinator, "first")
            node.end_rank((await reach(coordinator, first, "RUNNING")).fence, 0, code=3)
            node.finish((await reach(coordinator, first, "RUNNING", attempt=2)).fence)
            await reach(coordinator, first, "SUCCEEDED")
            second = await submit(coordinator, "second")
            await reach(coordinator, second, "RUNNING")
            await cancel(coordinator, second)
            await reach(coordinator, second, "CANCELLED")
            assert (await submit(coordinator, "first"), await submit(coordinator, "second")) == (first, second)
            await cancel(coordinator, second)
            await until(lambda: not node.desired and not node.unacked, "the node owes nothing any more")
            assert node.num_starts == 6, "three attempts of two ranks, each started once"
    if coordinator.left is not None:
        for job_id, states in coordinator.promised:
            assert coordinator.left.jobs[job_id].state.value in states, "an answer that the disk doesn't know"
    ended = await read_copy(coordinator.state_dir, folder / "end")
    assert {job.job_id: (job.spec.name, job.state.value, job.attempt) for job in ended.jobs.values()} == {
        first: ("first", "succeeded", 2),
        second: ("second", "cancelled", 1),
    }
    assert not ended.reservations
    return coordinator


async def submit(coordinator: Mortal, name: str) -> str:
    """Submit a job under its own request id, as often as it takes."""
    job_id = (await coordinator.asked(lambda client: client.submit(spec(name, restarts=1), f"r-{name}"))).job_id
    coordinator.promise(job_id, "queued", "starting", "running", "succeeded", "cancelling", "cancelled")
    return job_id


async def cancel(coordinator: Mortal, job_id: str) -> None:
    await coordinator.asked(lambda client: client.cancel(job_id))
    coordinator.promise(job_id, "cancelling", "cancelled")


async def reach(coordinator: Mortal, job_id: str, state: str, attempt: int = 1) -> jobs_pb2.Job:
    wanted = jobs_pb2.JobState.Value(f"JOB_STATE_{state}")
    seen: list[jobs_pb2.Job] = []

    async def is_reached() -> bool:
        seen[:] = [await coordinator.asked(lambda client: client.job(job_id))]
        return seen[0].state == wanted and seen[0].attempt >= attempt

    await until(is_reached, f"{job_id} is {state}")
    return seen[0]


def killed_at(folder: Path, step: int) -> list[str]:
    """Play the scenario with the death at every `step`-th statement until it has no such statement; return where it died."""

    async def one_side(points: Iterator[int]) -> AsyncIterator[str]:
        async with Launcher.running() as launcher:
            for at in points:
                (place := folder / str(at)).mkdir()
                coordinator = await play(place, launcher, at)
                if not coordinator.was_killed:
                    break
                yield coordinator.died.read_text()
                shutil.rmtree(place)

    async def every_side() -> list[str]:
        points = itertools.count(1, step)  # shared: each takes the next
        sides = [one_side(points) for _ in range(SIDE_BY_SIDE)]
        return [died for side in await asyncio.gather(*(gathered(each) for each in sides)) for died in side]

    return asyncio.run(every_side())


async def gathered(items: AsyncIterator[T]) -> list[T]:
    return [each async for each in items]


@pytest.mark.parametrize("step", [EVERY, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_at_any_statement_it_forgets_no_answer_and_starts_nothing_twice(tmp_path: Path, step: int) -> None:
    died = Counter(killed_at(tmp_path, step))
    assert died.total() >= 200 // step, died  # of about 300; how many share a transaction varies
    if step == 1:
        assert {"BEGIN IMMEDIATE\n", "COMMIT\n", "after COMMIT\n"} <= set(died)
