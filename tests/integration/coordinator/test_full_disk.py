"""The coordinator's disk is really full: a file system of 2 MiB, filled to the last byte, and freed again."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pipeapi.v1 import jobs_pb2
from tests.integration.coordinator.conftest import Served
from tests.integration.coordinator.scripted import DEADLINE_S, CoordinatorProcess, ScriptedNode, spec, until


def fill(file: Path) -> None:
    """Take what room there is."""
    with file.open("wb", buffering=0) as opened:
        for size in (65536, 1):
            with contextlib.suppress(OSError):
                while True:
                    opened.write(bytes(size))


async def is_ready(coordinator: CoordinatorProcess) -> bool:
    """Return what both probes say, once they agree."""

    async def said() -> list[bool]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{coordinator.endpoints['http']}/readyz") as reply,
            grpc.aio.insecure_channel(coordinator.endpoints["health"]) as channel,
        ):
            check = health_pb2_grpc.HealthStub(channel).Check
            health = await check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            both = {reply.status == 200, health.status == health_pb2.HealthCheckResponse.SERVING}
            return list(both) if len(both) == 1 else []

    return (await until(said, "both probes say the same"))[0]


def test_on_a_full_disk_it_only_reads_and_is_not_ready_and_goes_on_by_itself_when_there_is_room(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served(disk="2m") as (coordinator, client),
            ScriptedNode(coordinator.address, "n1").running() as node,
        ):
            job_id = (await client.submit(spec())).job_id
            fence = (await client.until_state(job_id, "RUNNING")).fence
            await until(lambda: not node.unacked, "everything is acknowledged")
            assert await is_ready(coordinator)
            filler = coordinator.files / "filler"
            fill(filler)
            with pytest.raises(grpc.aio.AioRpcError, match="free space under") as refused:
                await client.submit(spec("second"), "r2")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert not await is_ready(coordinator)
            acked = node.beats_acked
            await until(lambda: node.beats_acked > acked, "the node's session goes on")
            node.finish(fence)  # not to be acknowledged: it is not on disk
            await until(lambda: grpc.StatusCode.UNAVAILABLE in node.errors, "its facts are refused")
            assert (await client.job(job_id)).state == jobs_pb2.JOB_STATE_RUNNING
            assert node.unacked
            filler.unlink()
            await until(lambda: is_ready(coordinator), "it is ready again")
            job = await client.until_state(job_id, "SUCCEEDED")
            assert (job.attempt, node.num_starts) == (1, 2)
            assert not (await client.submit(spec("second"), "r2")).replayed

    asyncio.run(scenario())


@pytest.mark.parametrize("disk", ["8k", "64k"])
def test_on_a_disk_without_room_for_the_store_it_does_not_start_and_says_so(tmp_path: Path, disk: str) -> None:
    async def scenario() -> None:
        coordinator = CoordinatorProcess(tmp_path / "state", disk=disk)
        process = await coordinator.spawn()
        try:
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 1
        finally:
            if process.returncode is None:
                process.kill()
        assert "free space" in coordinator.log()
        assert "Traceback" not in coordinator.log()

    asyncio.run(scenario())
