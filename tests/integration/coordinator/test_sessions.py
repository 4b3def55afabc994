"""Registration, leases and lost contact over real gRPC."""

from __future__ import annotations

import asyncio
import signal

import grpc

from pipeapi.v1 import cluster_pb2, jobs_pb2
from tests.integration.coordinator.conftest import Served
from tests.integration.coordinator.scripted import DEADLINE_S, Client, ScriptedNode, spec, until

READY, LOST = cluster_pb2.NODE_STATE_READY, cluster_pb2.NODE_STATE_LOST


def test_a_silent_node_is_lost_after_its_lease_and_keeps_its_job_when_it_returns(served: Served) -> None:
    async def scenario() -> None:
        async with served(lease_ttl_s=0.6) as (coordinator, client):
            node = ScriptedNode(coordinator.address, "n1")
            async with node.running():
                job_id = (await client.submit(spec())).job_id
                fence = (await client.until_state(job_id, "RUNNING")).fence
                node.cut()

                async def is_lost() -> bool:
                    return (await client.nodes())["n1"].state == LOST

                await until(is_lost, "the node is lost", 5.0)
                assert (await client.job(job_id)).state == jobs_pb2.JOB_STATE_RUNNING
                node.heal()

                async def is_back() -> bool:
                    found = (await client.nodes())["n1"]
                    return (found.state, found.incarnation) == (READY, 2)

                await until(is_back, "the node is back under a new incarnation")
                node.finish(fence)
                job = await client.until_state(job_id, "SUCCEEDED")
                assert (job.attempt, node.num_starts) == (1, 2)

    asyncio.run(scenario())


def test_a_job_whose_node_lost_its_workers_is_started_anew_and_its_first_attempt_has_failed_as_node_lost(
    served: Served,
) -> None:
    async def scenario() -> None:
        async with served(lease_ttl_s=0.6) as (coordinator, client):
            async with ScriptedNode(coordinator.address, "n1").running():
                job_id = (await client.submit(spec())).job_id
                await client.until_state(job_id, "RUNNING")

            async def is_lost() -> bool:
                return (await client.nodes())["n1"].state == LOST

            await until(is_lost, "the node is lost", 5.0)
            async with ScriptedNode(coordinator.address, "n1", host_key="rebooted").running() as node:
                job = await until(lambda: reached(client, job_id, 2), "it runs anew")
                first = jobs_pb2.FailureReportRequest(job=job_id, attempt=1)
                failure = (await client.jobs.FailureReport(first, timeout=DEADLINE_S)).failure
                assert (failure.reason, failure.node_name) == (jobs_pb2.FAILURE_REASON_NODE_LOST, "n1")
                node.finish(job.fence)
                assert (await client.until_state(job_id, "SUCCEEDED")).restarts_used == 0

    asyncio.run(scenario())


async def reached(client: Client, job_id: str, attempt: int) -> jobs_pb2.Job | None:
    """Return the job if that attempt of it runs."""
    job = await client.job(job_id)
    return job if (job.attempt, job.state) == (attempt, jobs_pb2.JOB_STATE_RUNNING) else None


def test_cancel_ends_a_job_whose_node_is_lost_and_the_slots_wait_for_the_node(served: Served) -> None:
    async def scenario() -> None:
        async with served(lease_ttl_s=0.6) as (coordinator, client):
            node = ScriptedNode(coordinator.address, "n1")
            async with node.running():
                job_id = (await client.submit(spec())).job_id
                await client.until_state(job_id, "RUNNING")
                node.cut()

                async def is_away() -> bool:
                    return (await client.nodes())["n1"].state != READY

                await until(is_away, "its session is over")
                await client.cancel(job_id)
                await client.until_state(job_id, "CANCELLED")
                assert (await client.nodes())["n1"].slots_used == 2
                node.heal()

                async def is_free() -> bool:
                    return (await client.nodes())["n1"].slots_used == 0

                await until(is_free, "the node was told to stop and reported empty")

    asyncio.run(scenario())


def test_a_restarted_daemon_replaces_its_own_session_within_the_lease(served: Served) -> None:
    async def scenario() -> None:
        async with served(lease_ttl_s=30.0) as (coordinator, client):
            first = ScriptedNode(coordinator.address, "n1")
            second = ScriptedNode(coordinator.address, "n1", started=first.started)
            async with first.running():
                job_id = (await client.submit(spec())).job_id
                fence = (await client.until_state(job_id, "RUNNING")).fence
                await until(lambda: not first.unacked, "everything is acknowledged")
            async with second.running():
                await until(lambda: fence in second.desired, "the new daemon knows the attempt")
                assert second.welcome is not None
                assert second.welcome.incarnation == 1
                second.finish(fence)
                await client.until_state(job_id, "SUCCEEDED")

    asyncio.run(scenario())


def test_clones_strangers_and_taken_names_are_refused(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served(lease_ttl_s=30.0) as (coordinator, client),
            ScriptedNode(coordinator.address, "n1").running(),
        ):
            await until(client.nodes, "a node")
            address = coordinator.address
            strangers = (
                ScriptedNode(address, "n1", host_key="another machine"),
                ScriptedNode(address, "n1", node_id="another-id"),
                ScriptedNode(address, "n2", cluster_id="another cluster"),
                ScriptedNode(address, "n3", highest_fence=1000),
            )
            for stranger in strangers:
                async with stranger.running():
                    await until(lambda stranger=stranger: stranger.errors, "an answer")
                    assert set(stranger.errors) == {grpc.StatusCode.FAILED_PRECONDITION}
            assert list(await client.nodes()) == ["n1"]

    asyncio.run(scenario())


def test_facts_of_an_unknown_fence_are_acknowledged_and_change_nothing(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            await until(lambda: node.welcome, "a session")
            node.report(77, 0, joined={})
            node.report(77, attempt_empty={})
            await until(lambda: not node.unacked, "both are acknowledged")
            assert (await client.nodes())["n1"].state == READY

    asyncio.run(scenario())


def test_a_stopped_coordinator_loop_expires_no_lease(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served(lease_ttl_s=0.6) as (coordinator, client),
            ScriptedNode(coordinator.address, "n1").running() as node,
        ):
            await until(client.nodes, "a node")
            process = coordinator.process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(1.5)  # the fault itself: twice the lease
            process.send_signal(signal.SIGCONT)
            acked = node.beats_acked
            await until(lambda: node.beats_acked > acked + 30, "it answers beats again, for longer than a lease")
            reply = await client.jobs.Events(jobs_pb2.EventsRequest(), timeout=10)
            assert "node_lost" not in {each.name for each in reply.events}
            assert (await client.nodes())["n1"].incarnation == 1

    asyncio.run(scenario())
