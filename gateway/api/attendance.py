"""Attendance: which of the clients that wait for an answer are still there.

aiohttp tells a handler that its client has gone only when it writes, and one that waits for the engine does not write. So somebody
looks: one task at all of them together, which costs a microsecond a client, where a timer for each, or a timeout around each write,
costs more than the writing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02

Answer = Coroutine[Any, Any, web.StreamResponse]


class Attendance:
    """All of one gateway's."""

    def __init__(self) -> None:
        self._there: dict[asyncio.Task[Any], web.Request] = {}
        self._gone: set[asyncio.Task[Any]] = set()
        self._look: asyncio.TimerHandle | None = None

    async def while_there(self, request: web.Request, answer: Answer, name: str) -> web.StreamResponse | None:
        """What `answer` makes, for no longer than the client is there; None if it went. `name` is for the log.

        The answer is made in the caller's task: one of its own costs as much as the engine's first message."""
        task = asyncio.current_task()
        assert task is not None
        usual = task.get_name()
        task.set_name(f"speech-{name}")
        self._there[task] = request
        if self._look is None:
            self._look_soon()
        try:
            return await answer
        except ConnectionError:
            pass
        except asyncio.CancelledError:
            # Also when this gateway stops.
            if task not in self._gone or task.uncancel():
                raise
        finally:
            del self._there[task]
            self._gone.discard(task)
            # It goes on with the connection's next request.
            task.set_name(usual)
        log.info("%s: the client has gone", name)
        return None

    def _look_soon(self) -> None:
        self._look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_around)

    def _look_around(self) -> None:
        for task, request in self._there.items():
            # A second cancel would break off what the first has to tidy up.
            if not task.cancelling() and (request.transport is None or request.transport.is_closing()):
                self._gone.add(task)
                task.cancel()
        self._look = None
        if self._there:
            self._look_soon()
