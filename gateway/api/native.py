"""The native protocol's WebSocket, `/v1/speech`: JSON events both ways, and PCM as binary frames if the session asks for it."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack

from aiohttp import web

from gateway.api.outbox import Outbox
from gateway.api.owner import Owner
from gateway.config import GatewayConfig
from gateway.events import Error, Playback, ServerEvent, SessionCreated, UtteranceCancelled, UtteranceDone, UtteranceStarted
from gateway.keys import ACCESS, CALLERS, CONFIG, DRAIN, METRICS, OWNERS, SESSIONS
from gateway.logs import SESSION
from gateway.metrics import HeardGaps
from gateway.refusal import Refusal
from gateway.rtc.turn import ice_servers

log = logging.getLogger(__name__)

WHEP_PATH = "/v1/whep"


async def speech(request: web.Request) -> web.StreamResponse:
    """GET /v1/speech: a new session; with `?resume=TOKEN&received=COUNT` one whose socket has broken."""
    try:
        return await (_resume(request) if "resume" in request.query else _open(request))
    except ConnectionError:
        log.debug("a client went away before its socket was open")
        # Nobody is there to read it.
        return web.Response(status=499, reason="Client Closed Request")
    except Refusal as refusal:
        request.app[METRICS].refused(refusal.code)
        return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)


async def _open(request: web.Request) -> web.WebSocketResponse:
    app = request.app
    config, sessions, metrics = app[CONFIG], app[SESSIONS], app[METRICS]
    name = app[ACCESS].caller(request)
    app[DRAIN].check()
    if sessions.full:
        what = f"{config.max_sessions} sessions are open; try again soon, or raise max_sessions"
        raise Refusal(503, "too_many_sessions", what, retry_after_s=5.0)
    with ExitStack() as opening:
        caller = opening.enter_context(app[CALLERS].opened(name, time.monotonic()))
        socket = _socket(config)
        await socket.prepare(request)
        gaps = HeardGaps(metrics)

        def watch(event: ServerEvent) -> None:
            metrics.saw(event, "webrtc" if session.media.attached else "websocket")
            if isinstance(event, Playback):
                gaps.saw(event)
            _note(event)

        outbox = Outbox(watch)
        session = sessions.open(outbox)
        owner = Owner(session, outbox, caller, opening.pop_all(), sessions, config)
    app[OWNERS].add(owner)
    SESSION.set(session.ident)
    log.info("opened by %s", caller.name)
    base = config.public_url.rstrip("/") if config.public_url else str(request.url.origin())
    servers = ice_servers(config, session.ident, time.time())
    await owner.attend(request, socket, SessionCreated(session.ident, session.token, owner.token, base + WHEP_PATH, servers))
    return socket


async def _resume(request: web.Request) -> web.WebSocketResponse:
    """The session's own token is what counts: that of the API key may have expired meanwhile."""
    app = request.app
    app[ACCESS].check_origin(request)
    owner = app[OWNERS].by_token(request.query["resume"])
    said = request.query.get("received")
    if said is not None and not (said.isascii() and said.isdigit() and len(said) < 16):
        raise Refusal(400, "invalid_request", f"received: expected how many messages came over all sockets of this session, not {said[:60]!r}")
    received = None if said is None else int(said)
    await owner.claim(received)
    socket = _socket(app[CONFIG])
    prepared = False
    try:
        await socket.prepare(request)
        prepared = True
    finally:
        if not prepared:
            owner.disclaim()
    log.info("resumed", extra={"session": owner.session.ident})
    await owner.attend(request, socket, None, received)
    return socket


def _socket(config: GatewayConfig) -> web.WebSocketResponse:
    # Not autoping: an Owner wants to see the answers to its pings.
    return web.WebSocketResponse(compress=False, heartbeat=config.heartbeat_s, max_msg_size=config.max_event_bytes, autoping=False)


def _note(event: ServerEvent) -> None:
    """What a log wants to know of a session."""
    match event:
        case UtteranceStarted(utterance, ttfa_ms):
            log.info("started after %g ms", ttfa_ms, extra={"utterance": utterance})
        case UtteranceDone(utterance, reason, duration_ms):
            log.info("done (%s), %d ms of speech", reason, duration_ms, extra={"utterance": utterance})
        case UtteranceCancelled(utterance, heard_ms):
            log.info("cancelled, %d ms were heard", heard_ms, extra={"utterance": utterance})
        case Error(code, message, _, utterance):
            log.info("%s: %s", code, message, extra={"utterance": utterance})
        case _:
            pass
