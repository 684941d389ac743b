"""PcmLine: a session's audio as binary frames on its own WebSocket."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

from gateway.media.line import LineEvents
from gateway.media.opus import RATE
from gateway.media.playout import Playout


class AudioSocket(Protocol):
    """The session's WebSocket, as far as PcmLine needs it."""

    async def audio(self, utterance: int, pcm: bytes) -> None:
        """Queue a binary frame; waits while too much is queued."""

    def drop_audio(self, doomed: Collection[int]) -> None:
        """Forget queued frames of these utterances."""


class PcmLine:
    """Audio as binary frames, as fast as the engine makes it; playback is taken to start with the first frame."""

    def __init__(self, events: LineEvents, socket: AudioSocket) -> None:
        self.playout = Playout(RATE)
        self._events = events
        self._socket = socket
        self._writing = 0

    @property
    def queued_s(self) -> float:
        """See Line. What the socket has not taken yet counts as sent."""
        return 0.0

    @property
    def rtp_until(self) -> int | None:
        """See Line."""
        return None

    def begin(self, utterance: int, after: int | None) -> None:
        """See Line: all follow each other."""

    async def write(self, utterance: int, pcm: bytes) -> None:
        """See Line."""
        now_s = time.monotonic()
        if utterance != self._writing:
            self._writing = utterance
            self._events.audio_started(utterance, now_s, None)
        self.playout.sent(utterance, len(pcm) // 2, now_s)
        await self._socket.audio(utterance, pcm)

    async def end(self, utterance: int) -> None:
        """See Line."""
        self._events.audio_sent(utterance, time.monotonic())

    def drop(self, doomed: Collection[int], now_s: float) -> None:
        """See Line."""
        self._socket.drop_audio(doomed)
        if self._writing in doomed:
            self.playout.cut(now_s)
