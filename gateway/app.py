"""The aiohttp application: what it holds, and every route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path

from aiohttp import web

from gateway.api import cross_origin, native, operations, speech, tokens
from gateway.api.attendance import Attendance
from gateway.api.owner import Owners
from gateway.api.unread import Unread
from gateway.auth import Access
from gateway.config import GatewayConfig
from gateway.drain import Drain
from gateway.keys import ACCESS, ATTENDANCE, CALLERS, CONFIG, DRAIN, ENGINES, METRICS, OWNERS, PEERS, REQUESTS, SESSIONS
from gateway.limits import Callers
from gateway.metrics import Metrics
from gateway.pool import EnginePool
from gateway.rtc import ice, whep
from gateway.rtc.peers import Peers
from gateway.sessions import Sessions

MAX_BODY_BYTES = 1 << 18
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    # Scripts and styles of our own only; the page may talk to whatever chat API its user names.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; connect-src *; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PAGE_FILES = "{name:[A-Za-z0-9_./-]+\\.(html|js|mjs|css|svg|png|ico)}"


def create_app(config: GatewayConfig, engines: EnginePool) -> web.Application:
    """The gateway, ready to be run. The caller owns `engines`."""
    ice.install()
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app[CONFIG] = config
    app[ENGINES] = engines
    app[ACCESS] = Access(config)
    app[ATTENDANCE] = Attendance()
    app[CALLERS] = callers = Callers(config)
    app[SESSIONS] = sessions = Sessions(config, engines)
    app[DRAIN] = Drain(sessions, callers)
    app[OWNERS] = owners = Owners()
    app[METRICS] = Metrics(sessions, owners, callers, engines)
    app[PEERS] = Peers(config)
    app[REQUESTS] = asyncio.Semaphore(config.max_requests)
    app.on_response_prepare.append(cross_origin.allow)
    app.on_response_prepare.append(Unread(config.stalled_s).watch)
    app.on_shutdown.append(_hang_up)
    app.cleanup_ctx.append(_conversations)
    app.add_routes(
        [
            web.get("/v1/speech", native.speech),
            web.post("/v1/audio/speech", speech.speech),
            web.options("/v1/{speech:(audio|models)(/.*)?}", cross_origin.preflight),
            web.get("/v1/audio/voices", speech.voices),
            web.post("/v1/tokens", tokens.create),
            web.get("/v1/models", speech.models),
            web.get("/v1/models/{name:.+}", speech.model),
            web.options(native.WHEP_PATH, whep.options),
            web.get(native.WHEP_PATH, whep.discover),
            web.post(native.WHEP_PATH, whep.offer),
            web.options(native.WHEP_PATH + "/{ident}", whep.options),
            web.get(native.WHEP_PATH + "/{ident}", whep.discover, name="whep-listener"),
            web.patch(native.WHEP_PATH + "/{ident}", whep.trickle),
            web.delete(native.WHEP_PATH + "/{ident}", whep.hang_up),
            web.route("*", speech.ELSEWHERE, speech.elsewhere),
            web.get("/health", operations.health),
            web.get("/ready", operations.ready),
            web.get("/metrics", operations.metrics),
            web.get("/", page),
            web.get("/" + PAGE_FILES, page),
        ]
    )
    return app


async def page(request: web.Request) -> web.StreamResponse:
    """GET / and the files beside it: the browser demo."""
    return web.FileResponse(_page_file(request.match_info.get("name", "index.html")), headers=PAGE_HEADERS)


def _page_file(name: str) -> Path:
    root = Path(str(resources.files("web"))).resolve()
    file = (root / name).resolve()
    if not file.is_relative_to(root) or not file.is_file():
        raise web.HTTPNotFound
    return file


async def _hang_up(app: web.Application) -> None:
    """Before aiohttp waits for its handlers: close the WebSockets, which ends them."""
    app[SESSIONS].hang_up()


async def _conversations(app: web.Application) -> AsyncIterator[None]:
    yield
    await app[OWNERS].close_all()
    await app[SESSIONS].close_all()
    await app[PEERS].close_all()
