"""`piped node`, put together: state directory, channels, supervisor, session, bulk, metrics, health; and its end.

The composition root: the only place here that builds channels and clocks or looks at the environment. SIGTERM ends the
daemon and nothing else, unless stop_workers_on_exit is set. Called by piped.__main__.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import grpc
import structlog

from piped import systemd
from piped.config import NodeConfig, parse_address
from piped.node import devices, http, metrics
from piped.node.artifacts import downloader
from piped.node.bulk import Bulk
from piped.node.edges import Listener
from piped.node.facts import FactBook
from piped.node.health import HealthServer
from piped.node.model import Slot
from piped.node.orders import Place
from piped.node.preflight import Wires
from piped.node.prepare import Preparation
from piped.node.session import CHANNEL_OPTIONS, NodeIdentity, Session
from piped.node.state import StateDir, StateError
from piped.node.supervisor import Supervisor

log = structlog.get_logger()

_STOP_GRACE_S = 10.0
_LAST_WORDS_S = 2.0


async def run(config: NodeConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status. Raises ConfigError for what only this machine can tell."""
    interface = devices.interface_of(config.data_address)
    slots = await asyncio.to_thread(devices.find_slots, config.slots)
    try:
        state = StateDir(config.state_dir)
    except StateError as error:
        print(f"piped node: {error}", file=sys.stderr)
        return 1
    try:
        place = Place(state.node_id, config.name, config.data_address, interface)
        return await _serve(config, state, place, slots)
    finally:
        state.close()


async def _serve(config: NodeConfig, state: StateDir, place: Place, slots: tuple[Slot, ...]) -> int:
    """Bind what listens, run the node, and release it again."""
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    collector = metrics.JobCollector(state.node_id, config.name)
    health = HealthServer()
    async with AsyncExitStack() as ends:
        try:
            runner, metrics_address = await http.serve(
                metrics.registry(collector), *parse_address(config.metrics, "metrics")
            )
            ends.push_async_callback(runner.cleanup)
            health_address = await health.start(config.health) if config.health else None
            ends.push_async_callback(health.stop)
        except OSError as error:
            print(f"piped node: metrics or health can't be bound: {error}; choose another port", file=sys.stderr)
            return 1
        listener = Listener(state.node_id)
        ends.push_async_callback(listener.stop)
        try:
            probe_address = await listener.start(config.data_address)
        except OSError as error:
            print(f"piped node: data_address {config.data_address!r} can't be bound: {error}", file=sys.stderr)
            return 1
        state.publish_endpoints(metrics=metrics_address, health=health_address)
        log.info(
            "node_started",
            name=config.name,
            node_id=state.node_id,
            slots=[slot.device for slot in slots],
            metrics=metrics_address,
        )
        identity = NodeIdentity(
            node_id=state.node_id,
            node_name=config.name,
            host_key=state.host_key,
            version=importlib.metadata.version("pipectl"),
            data_address=config.data_address,
            metrics_address=_advertised(metrics_address, config.data_address),
            slots=slots,
            labels=config.labels,
            probe_address=probe_address,
        )
        await _work(config, state, place, identity, collector, health, leave)
    log.info("node_stopped")
    return 0


async def _work(
    config: NodeConfig,
    state: StateDir,
    place: Place,
    identity: NodeIdentity,
    collector: metrics.JobCollector,
    health: HealthServer,
    leave: asyncio.Event,
) -> None:
    """Re-adopt what runs, then hold the streams to the coordinator until told to leave."""

    def wall_ns() -> int:
        return time.time_ns() + round(config.clock_offset_s * 1e9)

    async def on_registration(is_registered: bool) -> None:
        await health.set_registered(is_registered)
        if is_registered:
            systemd.notify("READY=1", f"STATUS=registered with {config.coordinator}")
        else:
            systemd.notify(f"STATUS=looking for {config.coordinator}")

    async with (
        grpc.aio.insecure_channel(config.coordinator, options=CHANNEL_OPTIONS) as channel,
        grpc.aio.insecure_channel(config.coordinator, options=CHANNEL_OPTIONS) as bulk_channel,
    ):
        book = FactBook()
        wires = Wires()
        supervisor = Supervisor(
            state,
            place,
            book,
            collector,
            Preparation(place, wires, downloader(bulk_channel), config.min_free_mib << 20),
            base_env=dict(os.environ),
            keep_attempts=config.keep_attempts,
        )
        supervisor.adopt()
        work = {
            "supervisor": supervisor.run(),
            "session": Session(channel, identity, state, supervisor, book, wires, on_registration, wall_ns).run(),
            "bulk": Bulk(bulk_channel, state.node_id, state.attempts).run(),
            "watchdog": _feed_watchdog(),
        }
        await _until(leave, work, supervisor, book, stops_workers=config.stop_workers_on_exit)


async def _until(
    leave: asyncio.Event,
    work: dict[str, Coroutine[Any, Any, None]],
    supervisor: Supervisor,
    book: FactBook,
    *,
    stops_workers: bool,
) -> None:
    """Run `work` until asked to leave, then end it by cancellation."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one, name=name) for name, one in work.items()]
        await leave.wait()
        systemd.notify("STOPPING=1")
        if stops_workers:
            try:
                async with asyncio.timeout(_STOP_GRACE_S + 10.0):
                    await supervisor.stop_all(_STOP_GRACE_S)
                async with asyncio.timeout(_LAST_WORDS_S):
                    await book.wait_empty()
            except TimeoutError:
                log.warning(
                    "left_with_unfinished_work", running=[f for f, a in supervisor.observed().items() if a.started]
                )
        for task in tasks:
            task.cancel()


def _advertised(bound: str, data_address: str) -> str:
    """Return where others find what is bound at `bound`: every interface means the data address."""
    host, port = parse_address(bound, "metrics")
    if host not in ("0.0.0.0", "::"):
        return bound
    return f"[{data_address}]:{port}" if ":" in data_address else f"{data_address}:{port}"


async def _feed_watchdog() -> None:
    every_s = systemd.watchdog_interval_s()
    while every_s is not None:
        systemd.notify("WATCHDOG=1")
        await asyncio.sleep(every_s)
