"""The HTTP face: /metrics (Prometheus text) and /healthz, on loopback only."""

from __future__ import annotations

import json
from collections.abc import Callable

from aiohttp import web

from hsfs.core.ports import Device
from hsfs.telemetry.metrics import Registry


async def start_http(
    host: str, port: int, registry: Registry, health: Callable[[], tuple[bool, list[Device]]]
) -> tuple[web.AppRunner, int]:
    """Serve; the runner to clean up at the end, and the port (for port 0). Raises OSError.

    /healthz answers 200 while the metadata server works, with the state of every backend: a broken
    backend is no reason to restart this process.
    """

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=registry.render(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    async def healthz(request: web.Request) -> web.Response:
        works, devices = health()
        body = {
            "ok": works,
            "backends": [{"name": d.name, "state": d.state, "why": d.why} for d in devices],
        }
        return web.Response(
            text=json.dumps(body), status=200 if works else 503, content_type="application/json"
        )

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, int(runner.addresses[0][1])
