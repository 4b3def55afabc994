"""Logs, traces and artifacts over real gRPC, and the HTTP side."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pipeapi.v1 import jobs_pb2
from tests.integration.coordinator.conftest import Served
from tests.integration.coordinator.scripted import DEADLINE_S, Client, ScriptedNode, spec, until


async def logs(client: Client, **request: object) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    call = client.jobs.Logs(jobs_pb2.LogsRequest(job="gpt", **request), timeout=DEADLINE_S)
    async for each in call:
        found[each.rank] = found.get(each.rank, b"") + each.data
    return found


def test_logs_come_from_the_nodes_whole_or_by_tail_also_after_the_end(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            node.files = {(0, "RECORD_KIND_LOG"): b"zero\n" * 1000, (1, "RECORD_KIND_LOG"): b"one\n"}
            job_id = (await client.submit(spec())).job_id
            fence = (await client.until_state(job_id, "RUNNING")).fence
            assert await logs(client) == {0: b"zero\n" * 1000, 1: b"one\n"}
            following = asyncio.create_task(logs(client, follow=True, ranks=[1]))
            node.finish(fence)
            assert await following == {1: b"one\n"}
            await client.until_state(job_id, "SUCCEEDED")
            assert await logs(client, ranks=[0], tail_bytes=10) == {0: b"zero\nzero\n"}

    asyncio.run(scenario())


def test_logs_of_a_node_that_is_away_are_waited_for_a_moment_and_then_said_to_be_there(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client):
            node = ScriptedNode(coordinator.address, "n1")
            async with node.running():
                await client.until_state((await client.submit(spec())).job_id, "RUNNING")

            async def error() -> str:
                try:
                    await logs(client)
                except grpc.aio.AioRpcError as raised:
                    return f"{raised.code().name}: {raised.details()}"
                return ""

            assert (await error()).startswith("UNAVAILABLE: node n1 is not connected")
            node.files = {(0, "RECORD_KIND_LOG"): b"zero\n"}
            asking = asyncio.create_task(logs(client, ranks=[0]))
            async with node.running():
                assert await asking == {0: b"zero\n"}

    asyncio.run(scenario())


def test_trace_sends_each_kind_from_the_ranks_that_wrote_it(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            node.files = {
                (0, "RECORD_KIND_TRACE"): b"t0\n",
                (1, "RECORD_KIND_TRACE"): b"t1\n",
                (1, "RECORD_KIND_STEPS"): b"s1\n",
                (0, "RECORD_KIND_PLAN"): b"{}",
            }
            await client.until_state((await client.submit(spec())).job_id, "RUNNING")

            async def trace(kind: str) -> list[tuple[int, bytes]]:
                call = client.jobs.Trace(jobs_pb2.TraceRequest(job="gpt", kind=kind), timeout=DEADLINE_S)
                return [(each.rank, each.data) async for each in call]

            assert await trace("RECORD_KIND_TRACE") == [(0, b"t0\n"), (1, b"t1\n")]
            assert await trace("RECORD_KIND_STEPS") == [(1, b"s1\n")]
            assert await trace("RECORD_KIND_PLAN") == [(0, b"{}")]

    asyncio.run(scenario())


def test_an_artifact_is_stored_only_under_its_own_hash_and_a_job_needs_it(served: Served) -> None:
    data = bytes(range(256)) * 3000
    sha256 = hashlib.sha256(data).hexdigest()

    def pieces(named: str) -> Iterator[jobs_pb2.UploadRequest]:
        yield jobs_pb2.UploadRequest(sha256=named)
        for start in range(0, len(data), 256 * 1024):
            yield jobs_pb2.UploadRequest(data=data[start : start + 256 * 1024])

    async def scenario() -> None:
        async with served() as (coordinator, client):
            with pytest.raises(grpc.aio.AioRpcError, match="no artifact"):
                await client.submit(spec(source_sha256=sha256))
            for wrong in ("0" * 64, "../../lock"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await client.artifacts.Upload(pieces(wrong), timeout=DEADLINE_S)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert list((coordinator.state_dir / "artifacts").iterdir()) == []
            reply = await client.artifacts.Upload(pieces(sha256), timeout=DEADLINE_S)
            assert (reply.sha256, reply.size_bytes) == (sha256, len(data))
            assert (await client.artifacts.Has(jobs_pb2.HasRequest(sha256=sha256), timeout=DEADLINE_S)).present
            call = client.artifacts.Download(jobs_pb2.DownloadRequest(sha256=sha256), timeout=DEADLINE_S)
            assert b"".join([each.data async for each in call]) == data
            await client.submit(spec(source_sha256=sha256))

    asyncio.run(scenario())


def test_http_serves_metrics_targets_and_readiness_and_health_answers_on_its_own_port(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served() as (coordinator, client),
            ScriptedNode(coordinator.address, "n1").running(),
            aiohttp.ClientSession(f"http://{coordinator.endpoints['http']}") as http,
        ):
            await until(client.nodes, "a node")
            await client.submit(spec(stages=8))

            async def text(path: str) -> str:
                async with http.get(path) as reply:
                    assert reply.status == 200
                    return await reply.text()

            metrics = await text("/metrics")
            for line in (
                'piped_coordinator_jobs{state="queued"} 1.0',
                'piped_coordinator_nodes{state="ready"} 1.0',
                'piped_node_slots{state="free"} 2.0',
                'piped_coordinator_node_lease_expiry_timestamp_seconds{node="n1"}',
                'piped_coordinator_rpc_duration_seconds_count{code="OK",method="Submit"} 1.0',
                "piped_coordinator_oldest_pending_seconds",
                "piped_build_info",
            ):
                assert line in metrics
            own, node = json.loads(await text("/sd/prometheus"))
            assert own["targets"] == [coordinator.endpoints["http"]]
            assert node == {"targets": ["127.0.0.1:9002"], "labels": {"node": "n1"}}
            assert await text("/healthz") == "ok\n"
            assert await text("/readyz") == "ready\n"
            for address in (coordinator.endpoints["grpc"], coordinator.endpoints["health"]):
                async with grpc.aio.insecure_channel(address) as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
                    assert reply.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(scenario())
