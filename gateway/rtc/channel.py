"""Channel: a listener's data channel `events`. Reports and pings come in, what happens to the speech goes out. From the session's owner all
comes in that may come by its WebSocket."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiortc import InvalidStateError, RTCDataChannel

from gateway.events import Error, EventError, Ping, Pong, ServerEvent, Stats, decode_listener, encode, is_listeners

LABEL = "events"
MOST_UNREAD_BYTES = 1 << 16
"""A listener that reads nothing gets no more."""
MOST_PER_S = 50
MOST_CHARS = 2000


Act = Callable[[str], Error | None]
"""Does what a message of the session's owner says; returns what is wrong with it."""


class Channel:
    """One channel, for as long as its connection. `report` is called with each report and its time, `act` with what only the owner may say,
    if this is the owner's."""

    def __init__(self, channel: RTCDataChannel, report: Callable[[Stats, float], None], act: Act | None = None) -> None:
        self._channel = channel
        self._report = report
        self._act_for_owner = act
        self._second_s = 0.0
        self._messages = 0
        channel.add_listener("message", self._receive)

    def event(self, event: ServerEvent) -> None:
        """Send an event, if the listener still takes any."""
        if self._channel.readyState != "open" or self._channel.bufferedAmount > MOST_UNREAD_BYTES:
            return
        try:
            self._channel.send(encode(event))
        except (InvalidStateError, ConnectionError, ValueError):
            # It closes just now; or the event is longer than the listener takes, by its offer.
            return

    def _receive(self, message: str | bytes) -> None:
        if self._act_for_owner is not None and isinstance(message, str) and not is_listeners(message):
            # None of these may be lost: what an owner may say, and how much, is the session's to judge.
            wrong = self._act_for_owner(message)
            if wrong is not None:
                self.event(wrong)
            return
        now_s = time.monotonic()
        if now_s - self._second_s >= 1.0:
            self._second_s, self._messages = now_s, 0
        self._messages += 1
        if self._messages > MOST_PER_S:
            return
        try:
            self._act(message, now_s)
        except EventError as error:
            self.event(error.event())

    def _act(self, message: str | bytes, now_s: float) -> None:
        if isinstance(message, bytes):
            raise EventError("malformed_event", "an event is text; send JSON as a string")
        if len(message) > MOST_CHARS:
            raise EventError("event_too_long", f"an event here may have {MOST_CHARS} characters, this has {len(message)}")
        match decode_listener(message):
            case Stats() as stats:
                self._report(stats, now_s)
            case Ping():
                self.event(Pong())
