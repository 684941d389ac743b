"""Outbox: everything on its way to one client, in order, over all of its sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection

from aiohttp import WSCloseCode, web

from gateway.events import Playback, ServerEvent, UtteranceProgress, encode

log = logging.getLogger(__name__)

Item = str | tuple[int, bytes]
"""An event's JSON, or a binary frame: its utterance and its s16le samples."""


CUT_AFTER_S = 1.0
"""Who reads nothing does not read either why it is let go; its connection is cut then."""


class Lost(Exception):
    """The client misses more than is kept."""


class Outbox:
    """One task at a time, `run`, writes it out to a socket. `watch` sees each event.

    What was written lately is kept: a socket that breaks takes with it what the network had in hand. A client that comes back says how
    many messages it got, and is sent those behind again."""

    MAX_AUDIO_BYTES = 1 << 18
    MAX_EVENTS = 4096
    MAX_KEPT_BYTES = 1 << 20
    """Some 20 s of audio."""

    def __init__(self, watch: Callable[[ServerEvent], None]) -> None:
        self.sent = 0
        """Messages, over all sockets; those that were sent again count once."""
        self.leaving = asyncio.Event()
        """The client is to go."""
        self._watch = watch
        self._items: deque[Item] = deque()
        self._audio_bytes = 0
        self._kept: deque[Item | None] = deque()
        """The last of those `sent`; None is audio that nobody wants any more."""
        self._kept_bytes = 0
        self._away_s: float | None = None
        """Since when the client has had no socket."""
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._refusal: tuple[WSCloseCode, bytes] | None = None
        """Close at once."""
        self._cut: Callable[[], None] | None = None
        """Ends the connection of the socket that is written to, whatever its client has not taken."""
        self._farewell: tuple[WSCloseCode, bytes] | None = None
        """Close behind what is queued."""

    def event(self, event: ServerEvent) -> None:
        """Queue an event. A client that reads none of thousands is let go; one that is away is not told of what is out of date when it is
        back."""
        self._watch(event)
        if self._away_s is not None and isinstance(event, Playback | UtteranceProgress):
            return
        if len(self._items) < self.MAX_EVENTS:
            self._items.append(encode(event))
        elif self._refusal is None:
            self._refusal = (WSCloseCode.POLICY_VIOLATION, b"events are not being read")
            self.leaving.set()
            if self._cut is not None:
                asyncio.get_running_loop().call_later(CUT_AFTER_S, self._cut)
        self._filled.set()

    async def audio(self, utterance: int, pcm: bytes) -> None:
        """Queue a binary frame; waits while too much is queued."""
        self._items.append((utterance, pcm))
        self._count(len(pcm))
        self._filled.set()
        await self._room.wait()

    def drop_audio(self, doomed: Collection[int]) -> None:
        """Forget frames of these utterances."""
        kept = [item for item in self._items if isinstance(item, str) or item[0] not in doomed]
        self._items = deque(kept)
        self._audio_bytes = 0
        self._count(sum(len(item[1]) for item in kept if not isinstance(item, str)))
        self._kept = deque(None if isinstance(item, tuple) and item[0] in doomed else item for item in self._kept)
        self._kept_bytes = sum(_size(item) for item in self._kept)

    def hang_up(self) -> None:
        """Close the client's socket behind what is queued, for the gateway is stopping."""
        self.leave(WSCloseCode.GOING_AWAY, b"the gateway is stopping")

    def leave(self, code: WSCloseCode, why: bytes) -> None:
        """Close the client's socket behind what is queued."""
        self._farewell = (code, why)
        self._filled.set()
        self.leaving.set()

    def away(self) -> None:
        """The client has no socket."""
        self._away_s = time.monotonic()

    def away_for(self, now_s: float) -> float:
        """Seconds for which the client has had no socket, 0 while it has one."""
        return 0.0 if self._away_s is None else now_s - self._away_s

    def check(self, received: int | None) -> None:
        """Whether a client that got so many messages can be sent all the others. Raises Lost, or ValueError if so many were never sent."""
        if received is not None and received > self.sent:
            raise ValueError(f"received: {self.sent} messages were sent, not {received}; count those of all sockets of this session")
        if received is not None and self.sent - received > len(self._kept):
            what = f"received: of the {self.sent - received} messages behind {received} only {len(self._kept)} are kept"
            raise Lost(f"{what}; leave `received` out to go on without those that the network has lost")

    def back(self, first: ServerEvent, received: int | None) -> None:
        """The client has a socket again. `first` is the first thing it is told, then what it did not get."""
        self._away_s = None
        again: list[Item] = []
        while received is not None and self.sent > received:
            item = self._kept.pop()
            self.sent -= 1
            self._kept_bytes -= _size(item)
            if item is not None:
                again.append(item)
        self._items.extendleft(again)
        self._count(sum(len(item[1]) for item in again if not isinstance(item, str)))
        self._items.appendleft(encode(first))
        self._filled.set()

    async def run(self, socket: web.WebSocketResponse, cut: Callable[[], None]) -> None:
        """Write to the client until it is gone. `cut` ends its connection without waiting for anything."""
        self._cut = cut
        try:
            while True:
                while self._items and self._refusal is None:
                    item = self._items.popleft()
                    # Before it is written: whether it arrived only the client knows.
                    self._keep(item)
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
        except ConnectionError:
            # The reading side sees the same and ends the session, or waits for the client.
            log.debug("a client went away while being written to")

    def _keep(self, item: Item) -> None:
        self.sent += 1
        self._kept.append(item)
        self._kept_bytes += _size(item)
        while self._kept_bytes > self.MAX_KEPT_BYTES or len(self._kept) > self.MAX_EVENTS:
            self._kept_bytes -= _size(self._kept.popleft())

    def _count(self, audio_bytes: int) -> None:
        self._audio_bytes += audio_bytes
        if self._audio_bytes < self.MAX_AUDIO_BYTES:
            self._room.set()
        else:
            self._room.clear()


def _size(item: Item | None) -> int:
    return 0 if item is None else len(item) if isinstance(item, str) else len(item[1])
