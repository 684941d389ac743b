"""A stand-in for an OpenAI-compatible chat API, on a port and so an origin of its own: it answers as it is told to, in server-sent events
that come in awkward pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientConnectionResetError, web

PIECE_BYTES = 7
TOKEN_S = 0.03
KEY = "sk-only-in-memory"


@dataclass
class Chat:
    """What the server says, and what it was asked."""

    answer: str = ""
    stalls: bool = False
    """Goes silent after its answer, and does not end it."""
    cors: bool = True
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody left in mid-answer."""

    def _headers(self, request: web.Request) -> dict[str, str]:
        return {"Access-Control-Allow-Origin": request.headers["Origin"]} if self.cors else {}

    async def preflight(self, request: web.Request) -> web.Response:
        return web.Response(headers={**self._headers(request), "Access-Control-Allow-Headers": "authorization, content-type"})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "this key is unknown"}}, status=401, headers=self._headers(request))
        self.asked.append(await request.json())
        response = web.StreamResponse(headers={**self._headers(request), "Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(b": hello\r\n\r\n" + event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
            for at in range(0, len(self.answer), 4):
                data = event({"choices": [{"delta": {"content": self.answer[at : at + 4]}}]})
                for start in range(0, len(data), PIECE_BYTES):
                    await response.write(data[start : start + PIECE_BYTES])
                await asyncio.sleep(TOKEN_S)
            while self.stalls:
                await response.write(b": still here\n\n")
                await asyncio.sleep(TOKEN_S)
            await response.write(event({"choices": [], "usage": {"total_tokens": 9}}) + b"data: [DONE]\n\n")
        except (ClientConnectionResetError, asyncio.CancelledError):
            self.hung_up.set()
            raise
        return response


def event(data: dict[str, Any]) -> bytes:
    """UTF-8 as it is, so that a piece may end inside a character; CRLF, so that it may end inside a line's end."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\r\n\r\n".encode()


@asynccontextmanager
async def chat_server(chat: Chat) -> AsyncIterator[Chat]:
    app = web.Application()
    app.router.add_options("/v1/chat/completions", chat.preflight)
    app.router.add_post("/v1/chat/completions", chat.complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    chat.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield chat
    await runner.cleanup()
