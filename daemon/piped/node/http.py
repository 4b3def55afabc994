"""`GET /metrics` of a node, in the daemon's own loop. Built by piped.node.app."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest


async def serve(registry: CollectorRegistry, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Serve until `runner.cleanup()`; return the runner and the bound "host:port". Raises OSError."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    bound = runner.addresses[0]
    text = f"[{bound[0]}]" if ":" in str(bound[0]) else str(bound[0])
    return runner, f"{text}:{bound[1]}"
