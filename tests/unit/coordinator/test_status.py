"""One table from errors to status codes, and a limit to every unary call."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pipeapi import status as rich
from pipeapi.v1 import cluster_pb2, cluster_pb2_grpc
from piped import errors
from piped.coordinator import status


def kinds(base=errors.PipedError):
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_and_a_reason_of_its_own_that_programs_can_read(kind):
    error = kind.__new__(kind)
    error.__dict__ |= {"violations": (), "holder": "j1", "hint": "h", "pid": 1}
    metadata = rich.encode(status.code_of(error).value[0], "text", status.details_of(error))
    assert rich.decode(metadata).reason == kind.reason
    assert [each.reason for each in kinds()].count(kind.reason) == 1


class Slow(cluster_pb2_grpc.ClusterServiceServicer):
    async def GetVersion(self, _request, _context):
        await asyncio.Event().wait()


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
