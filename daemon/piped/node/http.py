"""`GET /metrics` of a node, in the daemon's own loop. Built by piped.node.app.

Who asks for OpenMetrics, as Prometheus does, also gets exemplars: the step and chunk of an observation of each bucket.
"""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


async def serve(registry: CollectorRegistry, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Serve until `runner.cleanup()`; return the runner and the bound "host:port". Raises OSError."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

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
