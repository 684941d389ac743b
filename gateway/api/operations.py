"""/health: the gateway runs. /ready: it can speak."""

from __future__ import annotations

from aiohttp import web

from gateway.keys import ENGINES


async def health(request: web.Request) -> web.Response:
    """GET /health."""
    return web.json_response({"ok": True})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 with what the engine speaks with, or 503 with the reason."""
    engines = request.app[ENGINES]
    reason = engines.unready
    if reason is not None:
        return web.json_response({"ready": False, "reason": reason}, status=503, headers={"Retry-After": "1"})
    info = engines.info
    return web.json_response({"ready": True, "model": info.model, "voices": info.voices, "languages": info.languages, "device": info.device})
