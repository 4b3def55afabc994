"""grpc.health.v1 on a port of its own. Built by piped.node.app.

Service "" answers SERVING while the daemon's loop runs (liveness); service "registered" while it holds a session with
the coordinator (readiness).
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

REGISTERED = "registered"


class HealthServer:
    """The health service; nothing listens before `start`."""

    def __init__(self) -> None:
        self._servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen on "host:port"; return the bound one. Raises OSError."""
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"health: {address} can't be bound: {error}") from error
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_registered(False)
        await server.start()
        self._server = server
        return f"{address.rpartition(':')[0]}:{port}"

    async def set_registered(self, is_registered: bool) -> None:
        """Say whether this node holds a session."""
        status = health_pb2.HealthCheckResponse
        await self._servicer.set(REGISTERED, status.SERVING if is_registered else status.NOT_SERVING)

    async def stop(self) -> None:
        """End it; Watch streams are cut."""
        if self._server is not None:
            await self._server.stop(0)
