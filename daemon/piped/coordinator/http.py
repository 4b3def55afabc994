"""The coordinator's HTTP side, read-only: /metrics, /sd/prometheus, /healthz, /readyz.

Every number is taken from the committed state at the moment of the scrape. `server` starts and stops it.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from piped.coordinator.engine import Engine
from piped.coordinator.sessions import NodeService
from piped.core.model import JobState, NodeState
from piped.metrics import BUCKETS_S


class FleetCollector(Collector):
    """Gauges of jobs, nodes, slots and leases, made anew for each scrape."""

    def __init__(self, engine: Engine, nodes: NodeService, version: str) -> None:
        self._engine, self._nodes, self._version = engine, nodes, version

    def collect(self) -> Iterator[Metric]:
        """Yield every family; each state has a sample, also at 0."""
        state = self._engine.state
        live_nodes = [node for node in state.nodes.values() if not node.is_gone]
        yield _by_state(
            "piped_coordinator_jobs",
            "Jobs by state.",
            {each.value: 0 for each in JobState} | Counter(job.state.value for job in state.jobs.values()),
        )
        yield _by_state(
            "piped_coordinator_nodes",
            "Nodes by state.",
            {each.value: 0 for each in NodeState} | Counter(node.state.value for node in state.nodes.values()),
        )
        num_used = len(state.reservations)
        num_live = sum(len(node.slots) for node in live_nodes)
        num_used_live = sum(not state.nodes[node_id].is_gone for node_id, _slot in state.reservations)
        yield _by_state(
            "piped_node_slots",
            "Slots of the fleet; used ones may be on a lost node.",
            {"used": num_used, "free": num_live - num_used_live},
        )
        queued = [job.submitted_s for job in state.jobs.values() if job.state is JobState.QUEUED]
        oldest = GaugeMetricFamily("piped_coordinator_oldest_pending_seconds", "Age of the oldest queued job, else 0.")
        oldest.add_metric([], max(0.0, time.time() - min(queued)) if queued else 0.0)
        yield oldest
        lease = GaugeMetricFamily(
            "piped_coordinator_node_lease_expiry_timestamp_seconds",
            "Unix time at which a node's lease ends if it sends no further beat.",
            labels=["node"],
        )
        for node in live_nodes:
            lease.add_metric([node.node_name], time.time() + self._nodes.lease_expires_in_s(node.node_id))
        yield lease
        build = GaugeMetricFamily(
            "piped_build_info", "Constant 1.", labels=["version", "torch_version", "python_version"]
        )
        build.add_metric([self._version, "", platform.python_version()], 1.0)
        yield build


class HttpSide:
    """The registry and the routes."""

    def __init__(self, engine: Engine, why_not_ready: Callable[[], str]) -> None:
        self._engine, self._why_not_ready = engine, why_not_ready
        self.registry = CollectorRegistry()
        self.own_address = ""  # set once bound: its own entry in the list of targets
        self._rpc = Histogram(
            "piped_coordinator_rpc_duration_seconds",
            "Duration of unary calls.",
            ["method", "code"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def observe_rpc(self, method: str, code: str, duration_s: float) -> None:
        self._rpc.labels(method, code).observe(duration_s)

    def app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/sd/prometheus", self._targets),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        return app

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _targets(self, _request: web.Request) -> web.Response:
        nodes = sorted(self._engine.state.nodes.values(), key=lambda each: each.node_name)
        targets = [
            {"targets": [each.metrics_address], "labels": {"node": each.node_name}}
            for each in nodes
            if not each.is_gone and each.metrics_address
        ]
        own = {"targets": [self.own_address], "labels": {"component": "coordinator"}}
        return web.json_response([own, *targets])

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if why := self._why_not_ready():
            return web.Response(status=503, text=f"{why}\n")
        return web.Response(text="ready\n")


def _by_state(name: str, text: str, counts: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, count in counts.items():
        family.add_metric([state], count)
    return family
