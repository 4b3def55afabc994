"""kill -9 of the coordinator, then a new process on the same directory and port: no job is disturbed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from pipeapi.v1 import jobs_pb2
from tests.integration.coordinator.conftest import Served
from tests.integration.coordinator.scripted import DEADLINE_S, CoordinatorProcess, ScriptedNode, spec, until


async def kill_and_restart(coordinator: CoordinatorProcess) -> None:
    await coordinator.kill()
    await coordinator.start()


def test_killed_while_a_job_is_queued_the_next_process_runs_it(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client):
            job_id = (await client.submit(spec())).job_id
            await kill_and_restart(coordinator)
            assert (await client.submit(spec())).replayed
            async with ScriptedNode(coordinator.address, "n1").running() as node:
                job = await client.until_state(job_id, "RUNNING")
                node.finish(job.fence)
                job = await client.until_state(job_id, "SUCCEEDED")
                assert job.attempt == 1

    asyncio.run(scenario())


def test_killed_while_nodes_prepare_the_next_process_starts_the_same_attempt(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served() as (coordinator, client),
            ScriptedNode(coordinator.address, "n1", num_slots=1).running() as first,
            ScriptedNode(coordinator.address, "n2", num_slots=1, holds=("prepare",)).running() as second,
        ):
            job_id = (await client.submit(spec())).job_id
            await until(lambda: first.started and not first.unacked and second.desired, "one of two nodes is prepared")
            await kill_and_restart(coordinator)
            second.holds = ()
            job = await client.until_state(job_id, "RUNNING")
            assert (job.attempt, first.num_starts, second.num_starts) == (1, 1, 1)
            for node in (first, second):
                node.finish(job.fence)
            await client.until_state(job_id, "SUCCEEDED")

    asyncio.run(scenario())


def test_killed_while_ranks_start_the_next_process_learns_what_happened_meanwhile(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served() as (coordinator, client),
            ScriptedNode(coordinator.address, "n1", joins=False).running() as node,
        ):
            job_id = (await client.submit(spec())).job_id
            await until(lambda: node.num_starts == 2 and not node.unacked, "both ranks are started")
            (fence,) = node.started
            await coordinator.kill()
            for rank in (0, 1):
                node.report(fence, rank, joined={})
            await coordinator.start()
            assert (await client.until_state(job_id, "RUNNING")).attempt == 1
            node.finish(fence)
            await client.until_state(job_id, "SUCCEEDED")
            assert node.num_starts == 2

    asyncio.run(scenario())


def test_killed_while_a_job_runs_no_worker_is_restarted_and_its_end_during_the_outage_counts(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            job_id = (await client.submit(spec())).job_id
            fence = (await client.until_state(job_id, "RUNNING")).fence
            await until(lambda: not node.unacked, "everything is acknowledged")
            await kill_and_restart(coordinator)
            job = await client.job(job_id)
            assert (job.state, job.attempt, job.fence) == (jobs_pb2.JOB_STATE_RUNNING, 1, fence)
            await until(lambda: node.welcome is not None and node.welcome.coordinator_epoch == 2, "reconnected")
            node.end_rank(fence, 0)
            await coordinator.kill()
            node.end_rank(fence, 1)
            await coordinator.start()
            job = await client.until_state(job_id, "SUCCEEDED")
            assert (job.attempt, node.num_starts) == (1, 2)
            await until(lambda: not node.desired and not node.unacked, "the node owes nothing any more")

    asyncio.run(scenario())


def test_a_worker_that_dies_while_the_coordinator_is_down_fails_the_job_when_it_is_back(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            job_id = (await client.submit(spec())).job_id
            fence = (await client.until_state(job_id, "RUNNING")).fence
            await coordinator.kill()
            node.end_rank(fence, 1, code=None, signal_number=9)
            await coordinator.start()
            failure = (await client.until_state(job_id, "FAILED")).failure
            assert (failure.reason, failure.rank) == (jobs_pb2.FAILURE_REASON_SIGNALLED, 1)

    asyncio.run(scenario())


def test_a_second_coordinator_on_the_directory_exits_1_and_names_the_holder(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client):
            second = await coordinator.spawn()
            assert await asyncio.wait_for(second.wait(), DEADLINE_S) == 1
            assert coordinator.process is not None
            assert f"held by the coordinator with pid {coordinator.process.pid}" in coordinator.log()
            await client.nodes()

    asyncio.run(scenario())


def test_a_listener_beyond_loopback_is_refused_unless_insecure_is_written_out(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "piped", "coordinator", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run([*command, "--listen", "0.0.0.0:0"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 78
    assert "insecure" in done.stderr
    assert not (tmp_path / "state").exists()


def test_a_second_coordinator_on_the_port_exits_1(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, _client):
            other = CoordinatorProcess(coordinator.state_dir.parent / "other", address=coordinator.address)
            process = await other.spawn()
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 1
            assert "can't be bound" in other.log()

    asyncio.run(scenario())


def test_a_stop_ends_open_streams(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            await until(client.nodes, "a node")
            job_id = (await client.submit(spec(stages=8))).job_id
            watch = client.jobs.Watch(jobs_pb2.WatchRequest(job=job_id), timeout=DEADLINE_S)
            await watch.read()
            assert await coordinator.stop() == 0
            assert (await watch.code()).name == "UNAVAILABLE"
            assert "UNAVAILABLE" in {each.name for each in node.errors}

    asyncio.run(scenario())


def test_events_that_are_followed_come_once_each_over_a_restart_until_the_job_has_ended(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            fence = (await client.until_state((await client.submit(spec())).job_id, "RUNNING")).fence
            command = [sys.executable, "-m", "pipectl", "--coordinator", coordinator.address]
            following = await asyncio.create_subprocess_exec(
                *(*command, "events", "gpt", "--follow", "-o", "json"), stdout=asyncio.subprocess.PIPE
            )
            assert following.stdout is not None
            first = await asyncio.wait_for(following.stdout.readline(), DEADLINE_S)
            await kill_and_restart(coordinator)
            await client.nodes()
            node.finish(fence)
            rest, _ = await asyncio.wait_for(following.communicate(), DEADLINE_S)
            shown = [json.loads(line) for line in (first + rest).splitlines()]
            all_events = await client.jobs.Events(jobs_pb2.EventsRequest(job="gpt"), timeout=DEADLINE_S)
            assert [int(each["event_seq"]) for each in shown] == [each.event_seq for each in all_events.events]
            assert {"job_submitted", "job_succeeded", "attempt_ended"} <= {each["name"] for each in shown}
            assert following.returncode == 0

    asyncio.run(scenario())
