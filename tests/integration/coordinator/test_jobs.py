"""The life of a job over real gRPC, with nodes that speak the real protocol."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pipeapi import status
from pipeapi.v1 import jobs_pb2, nodes_pb2
from tests.integration.coordinator.conftest import Served
from tests.integration.coordinator.scripted import DEADLINE_S, ScriptedNode, spec, until


def test_a_job_is_placed_prepared_run_and_succeeds(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            job_id = (await client.submit(spec(env={"TOKEN": "canary"}, redacted_env=["TOKEN"]))).job_id
            job = await client.until_state(job_id, "RUNNING")
            assert [(each.rank, list(each.stages), each.node_name) for each in job.workers] == [
                (0, [0], "n1"),
                (1, [1], "n1"),
            ]
            assert job.spec.env["TOKEN"] == "***"
            assert node.desired[job.fence].spec.env["TOKEN"] == "canary"
            assert (await client.nodes())["n1"].slots_used == 2
            await until(lambda: node.desired[job.fence].store_endpoint == "127.0.0.1:4000", "the store's address")
            node.finish(job.fence)
            await client.until_state(job_id, "SUCCEEDED")
            await until(lambda: not node.desired and not node.unacked, "the node owes nothing any more")
            assert (await client.nodes())["n1"].slots_used == 0

    asyncio.run(scenario())


def test_a_job_too_large_for_the_cluster_waits_and_says_why(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running():
            await until(client.nodes, "a node")
            job_id = (await client.submit(spec(stages=4))).job_id
            job = await client.job(job_id)
            assert job.pending_reason == "needs 4 slots, the cluster has 2 (1 node × 2), 0 in use"
            async with ScriptedNode(coordinator.address, "n2").running():
                await client.until_state(job_id, "RUNNING")

    asyncio.run(scenario())


def test_cancelling_a_running_job_stops_it_with_grace_and_a_queued_one_at_once(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served() as (coordinator, client),
            ScriptedNode(coordinator.address, "n1", holds=("stop",)).running() as node,
        ):
            running = await client.submit(spec("first"), "r1")
            await client.until_state(running.job_id, "RUNNING")
            queued = await client.submit(spec("second"), "r2")
            assert (await client.cancel(queued.job_id)).state == jobs_pb2.JOB_STATE_CANCELLED
            job = await client.cancel(running.job_id)
            assert job.state == jobs_pb2.JOB_STATE_CANCELLING
            desired = await until(
                lambda: [each for each in node.desired.values() if each.phase == nodes_pb2.PHASE_STOP], "a STOP"
            )
            assert desired[0].grace_s == 5.0
            node.report(job.fence, attempt_empty=nodes_pb2.AttemptEmpty())
            job = await client.until_state(running.job_id, "CANCELLED")
            assert not job.HasField("failure")
            assert (await client.cancel(running.job_id)).state == jobs_pb2.JOB_STATE_CANCELLED

    asyncio.run(scenario())


def test_a_failing_worker_ends_the_job_with_the_first_failing_rank_not_its_victim(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            job_id = (await client.submit(spec())).job_id
            fence = (await client.until_state(job_id, "RUNNING")).fence
            victim = nodes_pb2.WorkerFailed(is_transport=True, peer_rank=1, message="connection closed", step=3)
            node.report(fence, 0, worker_failed=victim)
            guilty = nodes_pb2.WorkerFailed(message="ValueError: bad batch", traceback="Traceback …", step=3)
            node.report(fence, 1, worker_failed=guilty)
            node.end_rank(fence, 1, code=1)
            job = await client.until_state(job_id, "FAILED")
            assert job.failure.reason == jobs_pb2.FAILURE_REASON_USER_ERROR
            assert (job.failure.rank, job.failure.node_name, list(job.failure.stages)) == (1, "n1", [1])
            assert job.failure.message == "ValueError: bad batch"
            assert (job.failure.traceback, job.failure.log_tail) == ("Traceback …", "tail of 1")
            report = await client.jobs.FailureReport(jobs_pb2.FailureReportRequest(job="gpt"), timeout=DEADLINE_S)
            assert (report.outcome, report.final, report.failure) == ("failed", True, job.failure)
            assert [(each.role, each.peer_rank) for each in report.ranks] == [
                (jobs_pb2.RANK_ROLE_VICTIM, 1),
                (jobs_pb2.RANK_ROLE_ROOT, -1),
            ]
            missing = jobs_pb2.FailureReportRequest(job="gpt", attempt=7)
            with pytest.raises(grpc.aio.AioRpcError, match="has no attempt 7: it had attempts 1 to 1"):
                await client.jobs.FailureReport(missing, timeout=DEADLINE_S)

    asyncio.run(scenario())


def test_a_job_that_its_only_node_refuses_waits_in_backoff_and_fails_with_the_reason_the_third_time(
    served: Served,
) -> None:
    async def scenario() -> None:
        async with (
            served() as (coordinator, client),
            ScriptedNode(coordinator.address, "n1", refuses="no space left").running() as node,
        ):
            job_id = (await client.submit(spec())).job_id
            waiting = await client.until_state(job_id, "BACKOFF")
            assert (waiting.attempt, waiting.HasField("retry_at")) == (2, True)
            assert "no space left" in waiting.pending_reason
            job = await client.until_state(job_id, "FAILED")
            assert job.failure.reason == jobs_pb2.FAILURE_REASON_INFRA
            assert "no space left" in job.failure.message
            assert job.attempt == 3
            assert node.num_starts == 0

    asyncio.run(scenario())


def test_ranks_that_never_join_fail_the_job_at_the_start_deadline_by_name(served: Served) -> None:
    async def scenario() -> None:
        async with (
            served() as (coordinator, client),
            ScriptedNode(coordinator.address, "n1", joins=False).running(),
        ):
            job_id = (await client.submit(spec(start_timeout_s=1))).job_id
            job = await client.until_state(job_id, "FAILED")
            assert job.failure.reason == jobs_pb2.FAILURE_REASON_START_TIMEOUT
            assert "not every rank joined within 1 s (recovery.start_timeout)" in job.failure.message
            assert "rank 0 on n1 (stages 0, spawned)" in job.failure.message

    asyncio.run(scenario())


def test_submit_is_idempotent_and_a_live_name_is_taken(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (_coordinator, client):
            replies = await asyncio.gather(*(client.submit(spec(), "same") for _ in range(20)))
            assert len({each.job_id for each in replies}) == 1
            assert sum(not each.replayed for each in replies) == 1
            with pytest.raises(grpc.aio.AioRpcError) as other_spec:
                await client.submit(spec(stages=3), "same")
            assert other_spec.value.code() is grpc.StatusCode.ALREADY_EXISTS
            with pytest.raises(grpc.aio.AioRpcError) as name_taken:
                await client.submit(spec(), "another")
            assert name_taken.value.code() is grpc.StatusCode.ALREADY_EXISTS
            details = status.decode(name_taken.value.trailing_metadata())
            assert details is not None
            assert (details.reason, details.metadata["job_id"]) == ("CONFLICT", replies[0].job_id)
            await client.cancel(replies[0].job_id)
            assert not (await client.submit(spec(), "another")).replayed

    asyncio.run(scenario())


def test_a_bad_spec_is_refused_with_every_field_and_an_unknown_job_with_near_names(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (_coordinator, client):
            bad = spec("Bad Name", stages=3, env={"RANK": "1"})
            bad.pipeline.stages_per_rank = 2
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.submit(bad)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            details = status.decode(refused.value.trailing_metadata())
            assert details is not None
            assert [field for field, _text in details.violations] == ["name", "pipeline.stages_per_rank", "env.RANK"]
            await client.submit(spec("digits"))
            with pytest.raises(grpc.aio.AioRpcError, match="did you mean digits") as unknown:
                await client.job("digit")
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


def test_watch_sends_progress_and_every_state_until_the_end(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (coordinator, client), ScriptedNode(coordinator.address, "n1").running() as node:
            job_id = (await client.submit(spec())).job_id
            fence = (await client.until_state(job_id, "RUNNING")).fence
            node.progress[fence, 1] = jobs_pb2.Progress(step=4, steps=10, loss=2.5)
            seen = []
            async for each in client.jobs.Watch(jobs_pb2.WatchRequest(job="gpt"), timeout=DEADLINE_S):
                seen.append(each.job)
                if each.job.progress.step == 4 and fence in node.started:
                    node.finish(fence)
            assert any(each.progress.loss == 2.5 and each.workers[1].step == 4 for each in seen)
            assert seen[-1].state == jobs_pb2.JOB_STATE_SUCCEEDED
            assert (seen[-1].progress.step, seen[-1].progress.steps) == (10, 10)

    asyncio.run(scenario())


def test_events_tell_the_story_of_a_job(served: Served) -> None:
    async def scenario() -> None:
        async with served() as (_coordinator, client):
            job_id = (await client.submit(spec())).job_id
            await client.cancel(job_id)
            reply = await client.jobs.Events(jobs_pb2.EventsRequest(job=job_id), timeout=DEADLINE_S)
            assert [each.name for each in reply.events] == ["job_submitted", "job_waits", "job_cancelled"]
            assert (await client.job(job_id)).event_seq == reply.events[-1].event_seq

    asyncio.run(scenario())
