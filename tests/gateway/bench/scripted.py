"""A server with OpenAI's speech API that does exactly what it was told, and keeps when it did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

RATE = 24_000


def tone(seconds: float, dbfs: float = -20.0) -> bytes:
    """A sine of this RMS level; silence below -90."""
    at_s = np.arange(round(seconds * RATE)) / RATE
    level = 0.0 if dbfs < -90 else 32768.0 * 10 ** (dbfs / 20) * 2**0.5
    return (level * np.sin(2 * np.pi * 440.0 * at_s)).astype("<i2").tobytes()


@dataclass
class Answer:
    """Pieces of PCM, each so many seconds after the one before; or a status. `broken` ends in mid-answer."""

    pieces: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    broken: bool = False


@dataclass
class Served:
    body: dict[str, Any]
    headers: dict[str, str]
    asked_s: float
    written_s: list[float] = field(default_factory=list)


class ScriptedServer:
    """`async with ScriptedServer(answer) as server:`; `answer(number)` says what becomes of the request of this number."""

    def __init__(self, answer: Callable[[int], Answer]) -> None:
        self.served: list[Served] = []
        self.most_at_once = 0
        self._answer = answer
        self._open = 0
        app = web.Application()
        app.router.add_post("/v1/audio/speech", self._speech)
        self._server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    async def __aenter__(self) -> ScriptedServer:
        await self._server.start_server()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._server.close()

    async def _speech(self, request: web.Request) -> web.StreamResponse:
        served = Served(await request.json(), dict(request.headers), time.monotonic())
        answer = self._answer(len(self.served))
        self.served.append(served)
        if answer.status != 200:
            return web.json_response({"error": {"message": "as it was told"}}, status=answer.status)
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            for delay_s, pcm in answer.pieces:
                await asyncio.sleep(delay_s)
                served.written_s.append(time.monotonic())
                await response.write(pcm)
            if answer.broken:
                assert request.transport is not None
                request.transport.close()
            return response
        finally:
            self._open -= 1
