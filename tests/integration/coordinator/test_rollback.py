"""The coordinator's store is replaced by an older backup while a node runs what the backup doesn't know."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import aiohttp
import grpc
import pytest

from pipeapi.v1 import cluster_pb2, jobs_pb2
from tests.integration.coordinator.conftest import Served
from tests.integration.coordinator.scripted import DEADLINE_S, CoordinatorProcess, ScriptedNode, spec, until


def back_up(state_dir: Path) -> None:
    with contextlib.closing(sqlite3.connect(state_dir / "coordinator.db")) as db:
        db.execute("VACUUM INTO ?", (str(state_dir / "backup"),))


def restore(state_dir: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        (state_dir / f"coordinator.db{suffix}").unlink(missing_ok=True)
    (state_dir / "backup").rename(state_dir / "coordinator.db")


async def readiness(coordinator: CoordinatorProcess) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{coordinator.endpoints['http']}/readyz") as reply,
    ):
        return reply.status, await reply.text()


def test_a_store_older_than_its_fleet_decides_nothing_until_the_rollback_is_accepted(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            await until(client.nodes, "a node")
            back_up(coordinator.state_dir)
            lost = await client.until_state((await client.submit(spec("lost"))).job_id, "RUNNING")
            await coordinator.kill()
            restore(coordinator.state_dir)
            await coordinator.start()

            async def is_told() -> bool:
                status, text = await readiness(coordinator)
                return status == 503 and "--accept-rollback" in text

            await until(is_told, "it is not ready and says what would help")
            with pytest.raises(grpc.aio.AioRpcError, match="older than its fleet") as refused:
                await client.submit(spec("next"), "r2")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert list(await client.nodes()) == ["n1"], "it still reads"
            assert list(node.started) == [lost.fence], "what runs there runs on"

            await coordinator.stop()
            coordinator.accept_rollback = True
            await coordinator.start()
            assert await readiness(coordinator) == (200, "ready\n")

            async def is_cordoned() -> bool:
                return f"fences {lost.fence})" in (await client.nodes())["n1"].cordon.why

            await until(is_cordoned, "the node is closed, since it runs what nobody knows")
            events = (await client.jobs.Events(jobs_pb2.EventsRequest(), timeout=DEADLINE_S)).events
            assert {"rollback_accepted", "unknown_attempts"} <= {each.name for each in events}
            job_id = (await client.submit(spec("next"), "r2")).job_id
            assert (await client.job(job_id)).state == jobs_pb2.JOB_STATE_QUEUED
            node.started.clear()  # the operator has killed the shim
            await client.cluster.UncordonNode(cluster_pb2.UncordonNodeRequest(node="n1", who="ann"), timeout=DEADLINE_S)
            job = await client.until_state(job_id, "RUNNING")
            assert job.fence > lost.fence
            coordinator.accept_rollback = False
            await coordinator.kill()
            await coordinator.start()
            node.finish(job.fence)
            await client.until_state(job_id, "SUCCEEDED")

    asyncio.run(scenario())
