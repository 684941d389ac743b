"""Attendance: which of the clients that wait for an answer are still there.

aiohttp tells a handler that its client has gone only when it writes, and one that waits for the engine does not write. So somebody
looks: one task at all of them together, which costs a microsecond a client, where a timer for each, or a timeout around each write,
costs more than the writing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02

Answer = Callable[["Client"], Coroutine[Any, Any, web.StreamResponse]]


class Client:
    """One request's, while its answer is made."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.writing_since_s: float | None = None
        """Since when a write has waited."""

    @property
    def gone(self) -> bool:
        """Whether its connection is closed."""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        """Waits while the client's socket is full. Raises ConnectionResetError if it has gone."""
        self.writing_since_s = asyncio.get_running_loop().time()
        await response.write(data)
        self.writing_since_s = None


class Attendance:
    """All of one gateway's. A client that takes nothing for `stalled_s` is let go."""

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._there: dict[Client, asyncio.Task[web.StreamResponse]] = {}
        self._look: asyncio.TimerHandle | None = None

    async def while_there(self, request: web.Request, answer: Answer, name: str) -> web.StreamResponse | None:
        """What `answer` makes, for no longer than the client is there; None if it went. `name` is for the log."""
        client = Client(request)
        task = asyncio.create_task(answer(client), name=f"speech-{name}")
        self._there[client] = task
        if self._look is None:
            self._look_soon()
        try:
            await asyncio.wait([task])
        finally:
            del self._there[client]
            if not task.done():
                # This gateway stops.
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled() or isinstance(task.exception(), ConnectionResetError):
            log.info("%s: the client has gone", name)
            return None
        return task.result()

    def _look_soon(self) -> None:
        self._look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_around)

    def _look_around(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for client, task in self._there.items():
            if task.cancelling():
                # A second cancel would break off what the first has to tidy up.
                continue
            if client.gone:
                task.cancel()
            elif client.writing_since_s is not None and now_s - client.writing_since_s >= self._stalled_s:
                log.info("%s takes nothing any more", task.get_name())
                if client.request.transport is not None:
                    client.request.transport.abort()
                task.cancel()
        self._look = None
        if self._there:
            self._look_soon()
