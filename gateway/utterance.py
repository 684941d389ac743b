"""Utterance: one stretch of text on its way from a session's sender to its listener."""

from __future__ import annotations

from engine import AudioChunk, Done, EngineUtterance
from gateway.media.opus import RATE
from gateway.settings import Settings
from gateway.spoken import SpokenText


class Utterance:
    """Text grows until `complete`; `number` is given when the engine begins it, so numbers are in speaking order."""

    def __init__(self, text: str, settings: Settings, now_s: float) -> None:
        self.number = 0
        self.settings = settings
        self.text = text
        self.complete = False
        self.last_text_s = now_s
        self.speakable_s = now_s
        """When its beginning could first be spoken: there was enough text, and the engine had taken it on."""
        self.engine: EngineUtterance | None = None
        self.reason: str | None = None
        self.samples = 0
        self.progress = 0
        self.started = False
        self.sent = False
        self._spoken = SpokenText(RATE)

    @property
    def blank(self) -> bool:
        """Nothing to say, so far."""
        return not self.text.strip()

    def append(self, text: str, now_s: float) -> None:
        """More text."""
        self.text += text
        self.last_text_s = now_s
        if self.engine is not None:
            self.engine.append(text)

    def finish(self) -> None:
        """No more text will come."""
        self.complete = True
        if self.engine is not None:
            self.engine.finish()

    def begin(self, engine: EngineUtterance) -> None:
        """The engine takes it on: hand over the text so far."""
        self.engine = engine
        engine.append(self.text)
        if self.complete:
            engine.finish()

    def chunk(self, event: AudioChunk) -> None:
        """More of its audio exists."""
        self.samples = event.position + len(event.pcm) // 2
        self._spoken.made(self.samples, event.text_until)

    def done(self, event: Done) -> str:
        """All of its audio exists. Returns the text that was left unspoken because the engine ran out of text, or of
        room for so long an utterance."""
        self.reason = event.reason
        self._spoken.complete(self.samples)
        if event.reason not in ("idle", "length"):
            return ""
        left = self.text[event.text_until :]
        self.text = self.text[: event.text_until]
        return left

    def heard_chars(self, heard: int) -> int:
        """An estimate of the characters heard with `heard` samples, cut back to a word's end."""
        return self._spoken.heard(self.text, heard)
