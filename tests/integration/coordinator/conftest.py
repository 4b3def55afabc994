from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.coordinator.scripted import Client, CoordinatorProcess

Served = Callable[..., AbstractAsyncContextManager[tuple[CoordinatorProcess, Client]]]
Scenario = Callable[[], Awaitable[None]]


@pytest.fixture
def served(tmp_path: Path) -> Served:
    """Return a context manager that serves an empty coordinator and gives its process and a client."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[tuple[CoordinatorProcess, Client]]:
        coordinator = CoordinatorProcess(tmp_path / "state", **settings)
        await coordinator.start()
        client = Client(coordinator.address)
        try:
            yield coordinator, client
        finally:
            await client.channel.close()
            await coordinator.stop()
        for mark in ("Traceback", "never retrieved", "bug", "RuntimeWarning"):
            assert mark not in coordinator.log(), coordinator.log()

    return serve
