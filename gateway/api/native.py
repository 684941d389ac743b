"""The native protocol's WebSocket, `/v1/speech`: JSON events both ways, and PCM as binary frames if the session asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from aiohttp import ClientConnectionResetError, WSCloseCode, WSMsgType, web

from gateway.events import EventError, ServerEvent, SessionCreated, decode, encode
from gateway.keys import CONFIG, SESSIONS
from gateway.session import Session

log = logging.getLogger(__name__)

HEARTBEAT_S = 20.0
WHEP_PATH = "/v1/whep"


class Outbox:
    """Everything on its way to one client, in order. One task, `run`, writes it out."""

    MAX_AUDIO_BYTES = 1 << 18
    MAX_EVENTS = 4096

    def __init__(self) -> None:
        self._items: deque[str | tuple[int, bytes]] = deque()
        self._audio_bytes = 0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._refusal: tuple[WSCloseCode, bytes] | None = None

    def event(self, event: ServerEvent) -> None:
        """Queue an event. A client that reads none of thousands is let go."""
        if len(self._items) >= self.MAX_EVENTS:
            self._refusal = (WSCloseCode.POLICY_VIOLATION, b"events are not being read")
        else:
            self._items.append(encode(event))
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
        """Close the client's socket, for the gateway is stopping."""
        self._refusal = (WSCloseCode.GOING_AWAY, b"the gateway is stopping")
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
                if self._refusal is not None:
                    await socket.close(code=self._refusal[0], message=self._refusal[1])
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
    config, sessions = request.app[CONFIG], request.app[SESSIONS]
    if sessions.full:
        body = {"code": "too_many_sessions", "message": f"{config.max_sessions} sessions are open", "retryable": True}
        return web.json_response(body, status=503, headers={"Retry-After": "5"})
    socket = web.WebSocketResponse(compress=False, heartbeat=HEARTBEAT_S, max_msg_size=config.max_event_bytes)
    await socket.prepare(request)
    outbox = Outbox()
    session = sessions.open(outbox)
    base = config.public_url.rstrip("/") if config.public_url else str(request.url.origin())
    outbox.event(SessionCreated(session.ident, session.token, base + WHEP_PATH))
    writer = asyncio.create_task(outbox.run(socket), name=f"write-{session.ident}")
    try:
        await _read(socket, session, outbox)
    finally:
        # aiohttp may cancel this handler while it waits: everything is told to stop first, then waited for.
        writer.cancel()
        await sessions.close(session)
        await asyncio.wait([writer])
        if not writer.cancelled() and (error := writer.exception()) is not None:
            raise error
    return socket


async def _read(socket: web.WebSocketResponse, session: Session, outbox: Outbox) -> None:
    """Events until the client goes. Only a breach of the protocol closes from our side (aiohttp itself refuses oversize frames)."""
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            try:
                session.handle(decode(message.data))
            except EventError as error:
                outbox.event(error.event())
        elif message.type is WSMsgType.BINARY:
            await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"clients send text frames only")
