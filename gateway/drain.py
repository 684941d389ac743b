"""Drain: the end of a gateway that lets what is being spoken be heard out."""

from __future__ import annotations

import asyncio
import logging
import time

from gateway.limits import Callers
from gateway.refusal import Refusal
from gateway.sessions import Sessions

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
RETRY_AFTER_S = 5.0


class Drain:
    """Once `begun`, nothing new is opened; sessions are closed as they fall silent, or have nobody to hear what is left to be spoken."""

    def __init__(self, sessions: Sessions, callers: Callers) -> None:
        self.begun = False
        self._sessions = sessions
        self._callers = callers

    def check(self) -> None:
        """Raises Refusal once it has begun."""
        if self.begun:
            raise Refusal(503, "draining", "the gateway is stopping; connect again, to another one or in a moment", retry_after_s=RETRY_AFTER_S)

    async def run(self, limit_s: float) -> None:
        """Begin, and wait until nothing is open any more, but no longer than `limit_s`."""
        self.begun = True
        log.info("draining: %d sessions and requests are open", self._callers.open)
        try:
            async with asyncio.timeout(limit_s):
                while self._callers.open:
                    self._sessions.hang_up_silent(time.monotonic())
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            log.warning("%d sessions and requests were still open after %g s", self._callers.open, limit_s)
