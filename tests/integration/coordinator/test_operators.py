"""What operators do, through pipectl and real gRPC, with nodes that speak the real protocol."""

from __future__ import annotations

import asyncio
import sys

from pipeapi.v1 import cluster_pb2, jobs_pb2, nodes_pb2
from tests.integration.coordinator.conftest import Served
from tests.integration.coordinator.scripted import DEADLINE_S, ScriptedNode, spec, until


async def pipectl(address: str, *arguments: str) -> tuple[int, str]:
    """Run one command; return its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pipectl", "--coordinator", address, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    return process.returncode or 0, printed.decode()


def test_a_drain_ends_when_the_node_is_empty_and_its_flags_outlive_the_coordinator(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served() as (coordinator, client),
            ScriptedNode(coordinator.address, "n1", holds=("stop",)).running() as node,
        ):
            job_id = (await client.submit(spec())).job_id
            fence = (await client.until_state(job_id, "RUNNING")).fence
            draining = asyncio.create_task(
                pipectl(coordinator.address, "drain", "n1", "--deadline", "0", "--why", "ram")
            )
            await client.until_state(job_id, "PREEMPTING")
            await coordinator.kill()
            await coordinator.start()
            assert [each.state for each in (await client.nodes())["n1"].attempts] == ["stopping"]
            await until(lambda: node.desired[fence].phase == nodes_pb2.PHASE_STOP, "a STOP after the restart")
            node.report(fence, attempt_empty=nodes_pb2.AttemptEmpty())
            await client.until_state(job_id, "QUEUED")
            code, printed = await draining
            assert (code, printed.endswith("n1 is drained\n")) == (0, True), printed
            assert "n1 waits for gpt" in printed
            listed = (await pipectl(coordinator.address, "get", "nodes"))[1]
            assert "drained by " in listed and ": ram; empty" in listed
            code, printed = await pipectl(coordinator.address, "uncordon", "n1")
            assert (code, printed) == (0, "n1: READY, open\n")
            assert (await client.until_state(job_id, "RUNNING")).attempt == 2

    asyncio.run(scenario())


def test_a_held_job_waits_until_it_is_released_and_a_higher_priority_makes_room(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client):
            first = (await client.submit(spec("first"), "r1")).job_id
            code, printed = await pipectl(coordinator.address, "hold", "first", "--why", "data")
            assert code == 0 and "HELD: held by " in printed and ": data" in printed
            async with ScriptedNode(coordinator.address, "n1").running():
                second = (await client.submit(spec("second"), "r2")).job_id
                await client.until_state(second, "RUNNING")
                assert (await pipectl(coordinator.address, "hold", "second"))[0] == 7
                assert (await pipectl(coordinator.address, "release", "first"))[0] == 0
                assert "next in line, after second" in (await client.job(first)).pending_reason
                urgent = (await client.submit(spec("urgent", priority=1), "r3")).job_id
                await client.until_state(urgent, "RUNNING")
                assert "next in line, after urgent" in (await client.job(first)).pending_reason
                assert (await client.job(second)).pending_reason == "waits behind first"

    asyncio.run(scenario())


def test_a_tenant_at_its_quota_waits_and_is_warned_before(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served(quotas={"ann": 1}) as (coordinator, client),
            ScriptedNode(coordinator.address, "n1", num_slots=4).running(),
        ):
            await until(client.nodes, "a node")
            large = spec("large", tenant="ann")
            reply = await client.jobs.Validate(jobs_pb2.ValidateRequest(spec=large), timeout=DEADLINE_S)
            assert list(reply.warnings) == ["the job would wait: it needs 2 slots, tenant ann may hold 1"]
            job_id = (await client.submit(large, "r1")).job_id
            assert (await client.job(job_id)).pending_reason == "needs 2 slots, tenant ann may hold 1 and holds 0"
            await client.until_state((await client.submit(spec("other"), "r2")).job_id, "RUNNING")

    asyncio.run(scenario())


def test_a_lost_node_is_forgotten_and_a_live_one_is_not(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client):
            async with ScriptedNode(coordinator.address, "n1").running():
                job_id = (await client.submit(spec())).job_id
                await client.until_state(job_id, "RUNNING")
                code, printed = await pipectl(coordinator.address, "forget", "n1")
                assert code == 7 and "node n1 is ready, not lost" in printed

            async def is_lost() -> bool:
                return (await client.nodes())["n1"].state == cluster_pb2.NODE_STATE_LOST

            await until(is_lost, "the end of its lease")
            draining = asyncio.create_task(pipectl(coordinator.address, "drain", "n1", "--deadline", "1h"))

            async def is_drained() -> bool:
                return (await client.nodes())["n1"].HasField("drain")

            await until(is_drained, "the drain")
            assert "being drained by " in (await pipectl(coordinator.address, "get", "nodes"))[1]
            code, printed = await pipectl(coordinator.address, "forget", "n1", "--why", "burnt")
            assert (code, printed) == (0, "n1 (id-n1) is forgotten\n")
            code, printed = await draining
            assert code == 7 and "nobody knows whether anything still runs there" in printed
            assert (await pipectl(coordinator.address, "forget", "n1"))[0] == 0  # as when the answer was lost
            assert (await pipectl(coordinator.address, "drain", "id-n1", "--deadline", "0"))[0] == 7
            assert "n1" not in await client.nodes()
            failure = (await client.until_state(job_id, "QUEUED")).failure  # of its last attempt
            assert failure.node_name == "n1" and "vanished" in failure.message
            assert (await pipectl(coordinator.address, "cordon", "n2"))[0] == 3

    asyncio.run(scenario())
