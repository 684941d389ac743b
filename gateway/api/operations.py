"""/health: the gateway runs. /ready: it can speak. /metrics: how it is doing."""

from __future__ import annotations

from aiohttp import web

from gateway.keys import ACCESS, DRAIN, ENGINES, METRICS
from gateway.refusal import Refusal


async def health(request: web.Request) -> web.Response:
    """GET /health."""
    return web.json_response({"ok": True})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 with what the engine speaks with, or 503 with the reason."""
    engines = request.app[ENGINES]
    reason = "the gateway is stopping" if request.app[DRAIN].begun else engines.unready
    if reason is not None:
        return web.json_response({"ready": False, "reason": reason}, status=503, headers={"Retry-After": "1"})
    info = engines.info
    speaks = {"model": info.model, "voices": info.voices, "languages": info.languages, "instructions": info.takes_instructions}
    return web.json_response({"ready": True, **speaks, "device": info.device})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus. Where there are API keys it takes one."""
    try:
        request.app[ACCESS].key_holder(request)
    except Refusal as refusal:
        return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)
    body, content_type = request.app[METRICS].exposition(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})
