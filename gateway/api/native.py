"""The native protocol's WebSocket, `/v1/speech`: JSON events both ways, and PCM as binary frames if the session asks for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from aiohttp import ClientConnectionResetError, WSCloseCode, WSMsgType, web

from gateway.config import GatewayConfig
from gateway.events import (
    Error,
    EventError,
    Ping,
    Playback,
    ServerEvent,
    SessionCreated,
    TextAppend,
    UtteranceCancelled,
    UtteranceDone,
    UtteranceStarted,
    decode,
    encode,
)
from gateway.keys import ACCESS, CALLERS, CONFIG, DRAIN, METRICS, SESSIONS
from gateway.limits import Caller
from gateway.logs import SESSION
from gateway.metrics import HeardGaps
from gateway.refusal import Refusal
from gateway.rtc.turn import ice_servers
from gateway.session import Session

log = logging.getLogger(__name__)

WHEP_PATH = "/v1/whep"


class Outbox:
    """Everything on its way to one client, in order. One task, `run`, writes it out. `watch` sees each event."""

    MAX_AUDIO_BYTES = 1 << 18
    MAX_EVENTS = 4096

    def __init__(self, watch: Callable[[ServerEvent], None]) -> None:
        self._watch = watch
        self._items: deque[str | tuple[int, bytes]] = deque()
        self._audio_bytes = 0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._refusal: tuple[WSCloseCode, bytes] | None = None
        """Close at once."""
        self._farewell: tuple[WSCloseCode, bytes] | None = None
        """Close behind what is queued."""

    def event(self, event: ServerEvent) -> None:
        """Queue an event. A client that reads none of thousands is let go."""
        if len(self._items) >= self.MAX_EVENTS:
            self._refusal = (WSCloseCode.POLICY_VIOLATION, b"events are not being read")
        else:
            self._items.append(encode(event))
        self._watch(event)
        self._filled.set()

    async def audio(self, utterance: int, pcm: bytes) -> None:
        """Queue a binary frame; waits while too much is queued."""
        self._items.append((utterance, pcm))
        self._count(len(pcm))
        self._filled.set()
        await self._room.wait()

    def drop_audio(self, first: int) -> None:
        """Forget queued frames of utterance `first` and later ones."""
        kept = [item for item in self._items if isinstance(item, str) or item[0] < first]
        self._items = deque(kept)
        self._audio_bytes = 0
        self._count(sum(len(item[1]) for item in kept if not isinstance(item, str)))

    def hang_up(self) -> None:
        """Close the client's socket behind what is queued, for the gateway is stopping."""
        self.leave(WSCloseCode.GOING_AWAY, b"the gateway is stopping")

    def leave(self, code: WSCloseCode, why: bytes) -> None:
        """Close the client's socket behind what is queued."""
        self._farewell = (code, why)
        self._filled.set()

    async def run(self, socket: web.WebSocketResponse) -> None:
        """Write to the client until it is gone."""
        try:
            while True:
                while self._items and self._refusal is None:
                    item = self._items.popleft()
                    if isinstance(item, str):
                        await socket.send_str(item)
                    else:
                        self._count(-len(item[1]))
                        await socket.send_bytes(item[1])
                if (reason := self._refusal or self._farewell) is not None:
                    await socket.close(code=reason[0], message=reason[1])
                    return
                self._filled.clear()
                await self._filled.wait()
        except ClientConnectionResetError:
            # The reading side sees the same and ends the session.
            log.debug("a client went away while being written to")

    def _count(self, audio_bytes: int) -> None:
        self._audio_bytes += audio_bytes
        if self._audio_bytes < self.MAX_AUDIO_BYTES:
            self._room.set()
        else:
            self._room.clear()


async def speech(request: web.Request) -> web.StreamResponse:
    """GET /v1/speech: a session for as long as the WebSocket is open."""
    app = request.app
    try:
        name = app[ACCESS].caller(request)
        app[DRAIN].check()
        if app[SESSIONS].full:
            what = f"{app[CONFIG].max_sessions} sessions are open; try again soon, or raise max_sessions"
            raise Refusal(503, "too_many_sessions", what, retry_after_s=5.0)
        with app[CALLERS].opened(name, time.monotonic()) as caller:
            return await _session(request, caller)
    except Refusal as refusal:
        app[METRICS].refused(refusal.code)
        return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)


async def _session(request: web.Request, caller: Caller) -> web.StreamResponse:
    config, sessions, metrics = request.app[CONFIG], request.app[SESSIONS], request.app[METRICS]
    socket = web.WebSocketResponse(compress=False, heartbeat=config.heartbeat_s, max_msg_size=config.max_event_bytes)
    try:
        await socket.prepare(request)
    except ClientConnectionResetError:
        log.debug("a client went away before its session was open")
        # Nobody is there to read it.
        return web.Response(status=499, reason="Client Closed Request")

    gaps = HeardGaps(metrics)

    def watch(event: ServerEvent) -> None:
        metrics.saw(event, "webrtc" if session.media.attached else "websocket")
        if isinstance(event, Playback):
            gaps.saw(event)
        _note(event)

    outbox = Outbox(watch)
    session = sessions.open(outbox)
    SESSION.set(session.ident)
    log.info("opened by %s", caller.name)
    base = config.public_url.rstrip("/") if config.public_url else str(request.url.origin())
    outbox.event(SessionCreated(session.ident, session.token, base + WHEP_PATH, ice_servers(config, session.ident, time.time())))
    writer = asyncio.create_task(outbox.run(socket), name=f"write-{session.ident}")
    try:
        await _read(socket, session, outbox, caller, config)
    finally:
        # aiohttp may cancel this handler while it waits: everything is told to stop first, then waited for.
        writer.cancel()
        await sessions.close(session)
        await asyncio.wait([writer])
        log.info("closed (%s)", socket.close_code)
        if not writer.cancelled() and (error := writer.exception()) is not None:
            raise error
    return socket


async def _read(socket: web.WebSocketResponse, session: Session, outbox: Outbox, caller: Caller, config: GatewayConfig) -> None:
    """Events until the client goes. Only a breach of the protocol, or a long silence, closes from our side (aiohttp itself refuses
    oversize frames)."""
    idle_s = config.idle_s
    idle_at_s: float | None = time.monotonic() + idle_s
    while True:
        try:
            async with asyncio.timeout(None if idle_at_s is None else max(0.0, idle_at_s - time.monotonic())):
                message = await socket.receive()
        except TimeoutError:
            if session.busy:
                idle_at_s = time.monotonic() + idle_s
            else:
                outbox.event(Error("session_idle", f"the session is closed: it had no text for {idle_s:g} s; open another when there is some", True))
                outbox.leave(WSCloseCode.POLICY_VIOLATION, b"idle")
                idle_at_s = None
            continue
        if message.type is WSMsgType.TEXT:
            try:
                event = decode(message.data)
                # The session refuses longer ones, at no cost.
                if isinstance(event, TextAppend) and len(event.text) <= config.max_append_chars:
                    caller.spend(len(event.text), time.monotonic())
                session.handle(event)
                if idle_at_s is not None and not isinstance(event, Ping):
                    idle_at_s = time.monotonic() + idle_s
            except EventError as error:
                outbox.event(error.event())
            except Refusal as refusal:
                outbox.event(Error(refusal.code, str(refusal), refusal.retryable))
        elif message.type is WSMsgType.BINARY:
            await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"clients send text frames only")
        elif message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
            return


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
