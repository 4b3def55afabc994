"""A node's streams overlap: the end of the old one is told while the registration on the new one is being stored."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc

from pipeapi.v1 import cluster_pb2, nodes_pb2, nodes_pb2_grpc
from piped.coordinator.bulk import BulkLinks
from piped.coordinator.engine import Engine
from piped.coordinator.hangs import HangWatch
from piped.coordinator.progress import ProgressBoard
from piped.coordinator.sessions import NodeService
from piped.core.liveness import Cadence, Leases
from piped.core.model import NodeState, State
from tests.unit.core.build import registration


class SlowDisk:
    """Keeps a commit waiting while it is `shut`."""

    def __init__(self):
        self.is_open, self.num_waiting = asyncio.Event(), 0
        self.is_open.set()

    async def commit(self, _before, _after, _records):
        self.num_waiting += 1
        await self.is_open.wait()
        self.num_waiting -= 1


@contextlib.asynccontextmanager
async def served():
    disk = SlowDisk()
    engine = Engine(State("c1", epoch=1), disk)
    leases = Leases(Cadence(1.0, 60.0), last_tick_s=0.0, not_before_s=0.0)
    service = engine.links = NodeService(engine, ProgressBoard(), BulkLinks(), leases, HangWatch(engine))
    server = grpc.aio.server()
    nodes_pb2_grpc.add_NodeServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    task = asyncio.create_task(engine.run())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield disk, engine, service, nodes_pb2_grpc.NodeServiceStub(channel)
    finally:
        disk.is_open.set()
        await server.stop(0)
        engine.finish()
        await task


async def until(condition):
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)


async def say_hello(stub):
    slots = [cluster_pb2.Slot(index=0, device="cpu:0")]
    hello = nodes_pb2.Hello(node_id="n1", node_name="n1", host_key="boot", slots=slots)
    call = stub.Session()
    await call.write(nodes_pb2.SessionRequest(hello=hello))
    return call


def test_the_old_streams_end_does_not_disconnect_the_session_that_replaced_it():
    async def scenario():
        async with served() as (disk, engine, service, stub):
            old = await say_hello(stub)
            assert (await old.read()).HasField("welcome")
            disk.is_open.clear()
            new = await say_hello(stub)
            await until(lambda: disk.num_waiting)
            old.cancel()
            await until(lambda: not service._open)  # its end is posted, behind the registration
            disk.is_open.set()
            assert (await asyncio.wait_for(new.read(), 10)).HasField("welcome")
            state = await engine.post(registration("n2"))
            assert state.nodes["n1"].state is NodeState.READY
            new.cancel()
            await until(lambda: engine.state.nodes["n1"].state is NodeState.DISCONNECTED)

    asyncio.run(scenario())


def test_a_stream_that_ends_while_its_registration_is_stored_leaves_no_node_that_seems_ready():
    async def scenario():
        async with served() as (disk, engine, _service, stub):
            disk.is_open.clear()
            call = await say_hello(stub)
            await until(lambda: disk.num_waiting)
            call.cancel()
            await until(lambda: not engine._inbox.empty())
            disk.is_open.set()
            await until(lambda: engine.state.nodes)
            await until(lambda: engine.state.nodes["n1"].state is NodeState.DISCONNECTED)

    asyncio.run(scenario())
