"""One table from errors to status codes, and a limit to every unary call."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pipeapi import status as rich
from pipeapi.v1 import cluster_pb2, cluster_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from piped import errors
from piped.coordinator import status


def kinds(base=errors.PipedError):
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_and_a_reason_of_its_own_that_programs_can_read(kind):
    error = kind.__new__(kind)
    error.__dict__ |= {"violations": (errors.FieldViolation("f", "d"),), "holder": "j1", "hint": "h", "pid": 1}
    code = status.code_of(error)
    told = rich.decode(rich.encode(code.value[0], "text", status.details_of(error)))
    assert told.reason == kind.reason
    assert [each.reason for each in kinds()].count(kind.reason) == 1
    assert code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    assert (told.retry_after_s is not None) == (code.name in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"))
    assert bool(told.violations) == issubclass(kind, errors.SpecError)


class Slow(cluster_pb2_grpc.ClusterServiceServicer):
    async def GetVersion(self, _request, _context):
        await asyncio.Event().wait()


class Endless(jobs_pb2_grpc.JobServiceServicer, jobs_pb2_grpc.ArtifactServiceServicer):
    async def Watch(self, _request, _context):
        yield jobs_pb2.WatchResponse()
        await asyncio.Event().wait()

    async def Upload(self, requests, _context):
        async for _ in requests:
            pass


def test_a_call_that_takes_too_long_is_ended_by_the_server_and_says_what_to_do():
    async def scenario():
        observed = []
        edge = status.Edge(lambda *what: observed.append(what[:2]), limit_s=0.01)
        server = grpc.aio.server(interceptors=[edge])
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(Slow(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="Ask again") as refused:
                await stub.GetVersion(cluster_pb2.GetVersionRequest())
            assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert rich.decode(refused.value.trailing_metadata()).reason == "TOO_SLOW"
        await server.stop(0)
        assert observed == [("GetVersion", "DEADLINE_EXCEEDED")]

    asyncio.run(scenario())


def test_an_upload_that_does_not_end_is_ended_and_one_stream_too_many_is_told_when_to_ask_again():
    async def scenario():
        edge = status.Edge(lambda *_: None, upload_limit_s=0.01, max_streams=1)
        server = grpc.aio.server(interceptors=[edge])
        jobs_pb2_grpc.add_JobServiceServicer_to_server(Endless(), server)
        jobs_pb2_grpc.add_ArtifactServiceServicer_to_server(Endless(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            upload = jobs_pb2_grpc.ArtifactServiceStub(channel).Upload()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await upload
            assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            jobs = jobs_pb2_grpc.JobServiceStub(channel)
            first = jobs.Watch(jobs_pb2.WatchRequest())
            await first.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await jobs.Watch(jobs_pb2.WatchRequest()).read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert rich.decode(refused.value.trailing_metadata()).retry_after_s == 5.0
            first.cancel()
        await server.stop(0)

    asyncio.run(scenario())
