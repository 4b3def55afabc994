"""Composition root of the coordinator: builds the parts, binds, serves, ends. The only place that does.

Order: hold the state directory, open the store (epoch + 1), start the engine, bind every listener, write
endpoints.json, say ready. The end is the reverse: not ready, end the streams, stop the servers, close the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import structlog
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pipeapi.v1 import cluster_pb2_grpc, jobs_pb2_grpc, nodes_pb2_grpc
from piped.config import CoordinatorConfig, parse_address
from piped.coordinator import store as stores
from piped.coordinator.artifacts import ArtifactFiles, ArtifactService
from piped.coordinator.bulk import BulkLinks
from piped.coordinator.cluster import ClusterService
from piped.coordinator.engine import Engine
from piped.coordinator.hangs import HangWatch
from piped.coordinator.history import History
from piped.coordinator.http import FleetCollector, HttpSide
from piped.coordinator.progress import ProgressBoard
from piped.coordinator.services import JobService
from piped.coordinator.sessions import NodeService, boottime_s
from piped.coordinator.status import Edge
from piped.coordinator.tasks import Closing
from piped.core import liveness
from piped.core.events import CoordinatorStarted
from piped.core.model import State
from piped.errors import NodeError, UnavailableError
from piped.systemd import notify, watchdog_interval_s

STOP_GRACE_S = 2.0
log = structlog.get_logger("coordinator")

# Each was needed in practice: two servers must not share a port, a burst of calls must wait rather than be cancelled,
# a proxy in the environment must not catch loopback, clients may ping every second, silent sockets are closed.
GRPC_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
)


async def run(config: CoordinatorConfig, *, accept_rollback: bool = False) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0, or 1 when it could not start.

    `config` is checked: its loader refuses plaintext listeners beyond loopback unless `insecure` is written out.
    `accept_rollback` is for one start on a store that is older than its fleet, and therefore in no file of settings.
    """
    try:
        lock = stores.hold(config.state_dir)
    except NodeError as error:
        log.error("start_refused", error=str(error))
        return 1
    store = stores.Store(config.state_dir)
    try:
        state = replace(await store.open(time.time()), quotas=dict(config.quotas))
        coordinator = Coordinator(config, store, state)
        return await coordinator.serve(CoordinatorStarted(accept_rollback))
    except (NodeError, UnavailableError) as error:
        log.error("start_refused", error=str(error))
        return 1
    finally:
        await store.close()
        os.close(lock)


class Coordinator:
    """The parts of one running coordinator."""

    def __init__(self, config: CoordinatorConfig, store: stores.Store, state: State) -> None:
        self._config = config
        self._closing = Closing()
        self._is_open = False  # everything is bound, and nothing is ending
        self._engine = Engine(state, store)
        self._hangs = HangWatch(self._engine)
        self._nodes, board, bulk = self._build_nodes(state)
        self._http = HttpSide(self._engine, self._why_not_ready)
        version = importlib.metadata.version("pipectl")
        self._http.registry.register(FleetCollector(self._engine, self._nodes, version))
        self._version = version
        files = ArtifactFiles(config.state_dir / "artifacts")
        self._artifacts = ArtifactService(self._engine, files)
        self._history = History(self._engine, store, self._closing)
        self._jobs = JobService(self._engine, self._history, board, bulk, files, self._closing)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs know only the threaded one

    def _build_nodes(self, state: State) -> tuple[NodeService, ProgressBoard, BulkLinks]:
        config, board, bulk = self._config, ProgressBoard(), BulkLinks()
        has_fleet = any(not each.is_gone for each in state.nodes.values())
        grace_s = config.lease_ttl_s + liveness.RESTART_GRACE_S if has_fleet else 0.0
        started_s = boottime_s()
        cadence = liveness.Cadence(config.beat_s, config.lease_ttl_s)
        leases = liveness.Leases(cadence, last_tick_s=started_s, not_before_s=started_s + grace_s)
        nodes = NodeService(self._engine, board, bulk, leases, self._hangs)
        self._engine.links = nodes
        return nodes, board, bulk

    async def serve(self, started: CoordinatorStarted) -> int:
        """Serve until a signal. Raises NodeError when an address can't be bound."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        refusal: NodeError | UnavailableError | None = None
        async with contextlib.AsyncExitStack() as opened, asyncio.TaskGroup() as tasks:
            engine = tasks.create_task(self._engine.run(), name="engine")
            running = [engine]
            try:
                await self._engine.post(started)
                await self._open(opened)
                running.append(tasks.create_task(self._nodes.tick_leases(), name="leases"))
                running.append(tasks.create_task(self._hangs.run(), name="hangs"))
                running.append(tasks.create_task(self._history.prune(), name="prune"))
                running.append(tasks.create_task(_feed_watchdog(), name="watchdog"))
                self._is_open = True
                await self._tell_health()
                notify("READY=1")
                running.append(tasks.create_task(self._follow_health(), name="health"))
                await stop.wait()
                log.info("stopping")
                notify("STOPPING=1")
                self._is_open = False
                await self._tell_health()
                self._nodes.end_all()
                self._closing.begin()
                await opened.aclose()
                self._engine.finish()
                await engine
            except (NodeError, UnavailableError) as error:  # kept out of the group, which would wrap it
                refusal = error
            finally:
                for task in running:
                    task.cancel()
        if refusal is not None:
            raise refusal
        return 0

    async def _open(self, opened: contextlib.AsyncExitStack) -> None:
        """Bind HTTP, gRPC and health, and publish where."""
        http_address = await _serve_http(self._http.app(), self._config.http, opened)
        self._http.own_address = http_address
        main = grpc.aio.server(options=GRPC_OPTIONS, interceptors=[Edge(self._http.observe_rpc)])
        cluster = ClusterService(self._engine, self._nodes, version=self._version, http_address=http_address)
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self._jobs, main)
        jobs_pb2_grpc.add_ArtifactServiceServicer_to_server(self._artifacts, main)
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, main)
        nodes_pb2_grpc.add_NodeServiceServicer_to_server(self._nodes, main)
        probe = grpc.aio.server(options=GRPC_OPTIONS)
        for server in (main, probe):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        endpoints = {
            "grpc": await _serve_grpc(main, self._config.listen, opened),
            "http": http_address,
            "health": await _serve_grpc(probe, self._config.health, opened),
            "pid": os.getpid(),
        }
        _write_atomically(self._config.state_dir / "endpoints.json", json.dumps(endpoints) + "\n")
        log.info("serving", **endpoints)

    def _why_not_ready(self) -> str:
        """Return what is in the way of deciding anything; empty when ready."""
        if not self._is_open:
            return "starting or stopping"
        return self._engine.rolled_back or ("" if self._engine.is_storing else "the store can't be written")

    async def _tell_health(self) -> None:
        answers = health_pb2.HealthCheckResponse
        await self._health.set("", answers.NOT_SERVING if self._why_not_ready() else answers.SERVING)

    async def _follow_health(self) -> None:
        """Have grpc.health.v1 say what /readyz says, until cancelled."""
        while True:
            await self._engine.turned.wait()
            self._engine.turned.clear()
            await self._tell_health()


async def _serve_http(app: web.Application, address: str, opened: contextlib.AsyncExitStack) -> str:
    host, port = parse_address(address, "http")
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_GRACE_S)
    await runner.setup()
    opened.push_async_callback(runner.cleanup)
    try:
        await web.TCPSite(runner, host, port, reuse_port=False).start()
    except OSError as error:
        raise NodeError(f"http = {address!r} can't be bound ({error.strerror}); choose another port") from error
    return _join(host, runner.addresses[0][1])


async def _serve_grpc(server: grpc.aio.Server, address: str, opened: contextlib.AsyncExitStack) -> str:
    host, _port = parse_address(address, "listen")
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise NodeError(f"{address!r} can't be bound ({error}); is another coordinator running there?") from error
    await server.start()
    opened.push_async_callback(server.stop, STOP_GRACE_S)
    return _join(host, port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(".part")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise NodeError(f"{path} can't be written ({error.strerror}); free space there") from error


async def _feed_watchdog() -> None:
    interval_s = watchdog_interval_s()
    while interval_s:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)
