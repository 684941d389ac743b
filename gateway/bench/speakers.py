"""The two ways to ask for speech: an HTTP request whose answer streams PCM, and this gateway's WebSocket with text word by word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from gateway.bench.listener import Listener
from gateway.bench.outcome import Outcome

REFUSALS = {429, 503}
REFUSAL_CODES = {"overloaded", "too_many_sessions", "too_many_utterances", "rate_limited", "text_rate_limited", "draining"}
TIMEOUT_S = 120.0
WORD_S = 0.010
"""Between two words of a text that is still being written."""


@dataclass(frozen=True)
class Target:
    """A server, and what is asked of it. `body` is added to each HTTP request."""

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

    async def prepare(self) -> None:
        pass

    async def say(self, outcome: Outcome, listener: Listener) -> None:
        target = self._target
        asked = {"model": target.model, "voice": target.voice, "input": outcome.text, "response_format": "pcm", "stream": True} | target.body
        body = {name: value for name, value in asked.items() if value is not None}
        async with self._http.post(f"{target.url}/v1/audio/speech", json=body, headers=target.headers) as response:
            if response.status != 200:
                outcome.status = "refused" if response.status in REFUSALS else "failed"
                outcome.why = f"{response.status}: {(await response.text())[:200]}"
                return
            async for chunk in response.content.iter_any():
                listener.hear(chunk, time.monotonic())
        outcome.status = "ok"


class SocketSpeaker:
    """The native protocol: one session speaks one text at a time, and is kept for the next."""

    def __init__(self, http: aiohttp.ClientSession, target: Target, idle: list[aiohttp.ClientWebSocketResponse]) -> None:
        self._http = http
        self._target = target
        self._idle = idle
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def prepare(self) -> None:
        """A session that is set up, from those that are idle or a new one."""
        while self._idle:
            socket = self._idle.pop()
            if not socket.closed:
                self._socket = socket
                return
        socket = await self._http.ws_connect(f"{self._target.url}/v1/speech", headers=self._target.headers, max_msg_size=0)
        update: dict[str, Any] = {"type": "session.update", "audio": {"format": "pcm_s16le"}}
        await socket.send_json(update | ({"voice": self._target.voice} if self._target.voice else {}))
        async for event in _events(socket, Listener(self._target.sample_rate)):
            if event["type"] == "session.updated":
                break
            if event["type"] == "error":
                await socket.close()
                raise aiohttp.ClientError(f"{event['code']}: {event['message']}")
        self._socket = socket

    async def say(self, outcome: Outcome, listener: Listener) -> None:
        assert self._socket is not None
        socket, self._socket = self._socket, None
        writing = asyncio.create_task(_write(socket, outcome.text))
        try:
            async for event in _events(socket, listener):
                if event["type"] == "error":
                    outcome.status = "refused" if event["code"] in REFUSAL_CODES else "failed"
                    outcome.why = f"{event['code']}: {event['message']}"
                    return
                # After "idle" the rest of the text follows as the next utterance.
                if event["type"] == "utterance.done" and event["reason"] != "idle":
                    outcome.status = "ok" if event["reason"] in ("end", "length") else "failed"
                    outcome.why = "" if outcome.status == "ok" else f"the utterance ended by {event['reason']}"
                    break
            else:
                outcome.why = f"the server closed the session ({socket.close_code})"
                return
            await writing
            self._idle.append(socket)
        finally:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await writing
            if socket not in self._idle:
                await socket.close()


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
