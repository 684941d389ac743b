"""The ways to ask for speech: an HTTP request whose answer streams PCM, and this gateway's WebSocket with text word by word, heard as PCM
on the same socket or by WebRTC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
from yarl import URL

from gateway.bench.listener import Listener
from gateway.bench.outcome import Outcome

if TYPE_CHECKING:
    from gateway.bench.ear import Ear

MODES = ("http", "socket", "webrtc")
REFUSALS = {429, 503}
REFUSAL_CODES = {"overloaded", "too_many_sessions", "too_many_utterances", "rate_limited", "text_rate_limited", "draining"}
TIMEOUT_S = 120.0
WORD_S = 0.010
"""Between two words of a text that is still being written."""
JITTER_S = 0.060
"""What a WebRTC listener buffers before it plays: packets leave in time for one that has 40 ms, and a network adds its own."""
LAST_S = 0.050
"""Packets may come so long after the event that says they have left."""


@dataclass(frozen=True)
class Target:
    """A server, and what is asked of it. `body` is added to each HTTP request, `sample_rate` is that of its PCM."""

    url: str
    mode: str = "http"
    model: str | None = None
    voice: str | None = None
    api_key: str | None = None
    sample_rate: int = 24_000
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def heard_rate(self) -> int:
        """Of what listeners are given, Hz."""
        return 48_000 if self.mode == "webrtc" else self.sample_rate

    def listener(self, *, keep: bool = False) -> Listener:
        """Somebody to hear an answer."""
        return Listener(self.heard_rate, JITTER_S if self.mode == "webrtc" else 0.0, keep=keep)


class Speaker(Protocol):
    async def prepare(self) -> None:
        """What is not part of the time measured, such as opening a session."""
        ...

    async def say(self, outcome: Outcome, listener: Listener) -> None:
        """Have `outcome.text` spoken into `listener`; sets status and why. Exceptions of aiohttp are the caller's."""
        ...


class HttpSpeaker:
    """`POST /v1/audio/speech`, answered with raw PCM as it is made."""

    def __init__(self, http: aiohttp.ClientSession, target: Target) -> None:
        self._http = http
        self._target = target
        self._url = URL(f"{target.url}/v1/audio/speech")

    async def prepare(self) -> None:
        pass

    async def say(self, outcome: Outcome, listener: Listener) -> None:
        target = self._target
        asked = {"model": target.model, "voice": target.voice, "input": outcome.text, "response_format": "pcm", "stream": True} | target.body
        body = {name: value for name, value in asked.items() if value is not None}
        async with self._http.post(self._url, json=body, headers=target.headers) as response:
            if response.status != 200:
                outcome.status = "refused" if response.status in REFUSALS else "failed"
                outcome.why = f"{response.status}: {(await response.text())[:200]}"
                return
            async for chunk in response.content.iter_any():
                listener.hear(chunk, time.monotonic())
        outcome.status = "ok"


@dataclass(eq=False)
class Session:
    """An open session of the native protocol, who hears it by WebRTC, and when all that was spoken in it will have been heard."""

    socket: aiohttp.ClientWebSocketResponse
    ear: Ear | None = None
    heard_s: float = 0.0

    async def close(self) -> None:
        await self.socket.close()
        if self.ear is not None:
            await self.ear.close()


class SocketSpeaker:
    """The native protocol: one session speaks one text at a time, and is kept among `idle` for the next."""

    def __init__(self, http: aiohttp.ClientSession, target: Target, idle: list[Session]) -> None:
        self._http = http
        self._target = target
        self._idle = idle
        self._session: Session | None = None

    async def prepare(self) -> None:
        """A session that is set up, from those that are idle or a new one. Where something is still to be heard, the next text would be
        spoken to somebody who listens to the one before."""
        silent = [session for session in self._idle if session.heard_s <= time.monotonic()]
        while self._session is None and silent:
            session = silent.pop()
            self._idle.remove(session)
            if session.socket.closed or (session.ear is not None and not session.ear.connected):
                await session.close()
            else:
                self._session = session
        if self._session is None:
            self._session = await self._open()

    async def _open(self) -> Session:
        target = self._target
        socket = await self._http.ws_connect(f"{target.url}/v1/speech", headers=target.headers, max_msg_size=0)
        session = Session(socket)
        try:
            update: dict[str, Any] = {"type": "session.update", "audio": {"format": "webrtc" if target.mode == "webrtc" else "pcm_s16le"}}
            await socket.send_json(update | ({"voice": target.voice} if target.voice else {}))
            async for event in _events(socket, target.listener()):
                if event["type"] == "error":
                    raise aiohttp.ClientError(f"{event['code']}: {event['message']}")
                if event["type"] == "session.created" and target.mode == "webrtc":
                    # Imported here: of all modes only this one needs aiortc.
                    from gateway.bench.ear import Ear

                    session.ear = Ear()
                    await session.ear.connect(self._http, event["whep"], event["token"])
                if event["type"] == "session.updated":
                    return session
            raise aiohttp.ClientError(f"the server closed the session ({socket.close_code})")
        except BaseException:
            await session.close()
            raise

    async def say(self, outcome: Outcome, listener: Listener) -> None:
        assert self._session is not None
        session, self._session = self._session, None
        if session.ear is not None:
            session.ear.listener = listener
        writing = asyncio.create_task(_write(session.socket, outcome.text))
        kept = False
        try:
            kept = await self._hear(session, outcome, listener)
            if kept:
                await writing
                session.heard_s = listener.dry_s
                self._idle.append(session)
        finally:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await writing
            if session.ear is not None:
                session.ear.listener = None
            if not kept:
                await session.close()

    async def _hear(self, session: Session, outcome: Outcome, listener: Listener) -> bool:
        """Until the text has been spoken; whether the session is good for another."""
        async for event in _events(session.socket, listener):
            if event["type"] == "error":
                outcome.status = "refused" if event["code"] in REFUSAL_CODES else "failed"
                outcome.why = f"{event['code']}: {event['message']}"
                return False
            # After "idle" the rest of the text follows as the next utterance.
            if event["type"] == "utterance.done" and event["reason"] != "idle":
                outcome.status = "ok" if event["reason"] in ("end", "length") else "failed"
                outcome.why = "" if outcome.status == "ok" else f"the utterance ended by {event['reason']}"
                if session.ear is not None:
                    await asyncio.sleep(LAST_S)
                return True
        outcome.why = f"the server closed the session ({session.socket.close_code})"
        return False


async def _write(socket: aiohttp.ClientWebSocketResponse, text: str) -> None:
    """Word by word, each at its time whatever the one before took."""
    begun_s = time.monotonic()
    for number, word in enumerate(re.findall(r"\S+\s*", text)):
        await asyncio.sleep(begun_s + number * WORD_S - time.monotonic())
        await socket.send_json({"type": "text.append", "text": word})
    await socket.send_json({"type": "text.end"})


async def _events(socket: aiohttp.ClientWebSocketResponse, listener: Listener) -> AsyncIterator[dict[str, Any]]:
    """The server's events until it closes; audio goes to the listener."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            listener.hear(message.data, time.monotonic())
        elif message.type is aiohttp.WSMsgType.TEXT:
            yield json.loads(message.data)
