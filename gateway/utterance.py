"""Utterance: one stretch of text on its way from a session's sender to its listener."""

from __future__ import annotations

from engine import AudioChunk, Done, EngineUtterance, is_speakable
from gateway.media.opus import RATE
from gateway.script import Script
from gateway.settings import Settings
from gateway.spoken import SpokenText


class Utterance:
    """Text grows until `complete`; `number` is given when the engine begins it, so numbers are in speaking order."""

    def __init__(self, script: Script, settings: Settings, now_s: float) -> None:
        self.number = 0
        self.settings = settings
        self.script = script
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
    def text(self) -> str:
        """As it was written; every position that a client is told counts its characters."""
        return self.script.written

    @property
    def blank(self) -> bool:
        """Nothing to say, so far."""
        return not is_speakable(self.script.said)

    def append(self, text: str, now_s: float) -> int:
        """More text; returns how many characters are said for it."""
        said = self.script.append(text)
        if said:
            self.last_text_s = now_s
            if self.engine is not None:
                self.engine.append(said)
        return len(said)

    def finish(self) -> None:
        """No more text will come."""
        said = self.script.finish()
        self.complete = True
        if self.engine is not None:
            self.engine.append(said)
            self.engine.finish()

    def begin(self, engine: EngineUtterance) -> None:
        """The engine takes it on: hand over the text so far."""
        self.engine = engine
        engine.append(self.script.said)
        if self.complete:
            engine.finish()

    def chunk(self, event: AudioChunk) -> None:
        """More of its audio exists."""
        self.samples = event.position + len(event.pcm) // 2
        self._spoken.made(self.samples, event.text_until)

    def done(self, event: Done) -> Script | None:
        """All of its audio exists. Returns the text that was left unspoken because the engine ran out of text, or of
        room for so long an utterance, or the voice went wrong; None if there is none."""
        self.reason = event.reason
        self._spoken.complete(self.samples)
        # A voice that went wrong before it had taken any text would do so again, and for ever.
        if event.reason in ("end", "empty") or event.text_until == 0 or (self.complete and not is_speakable(self.script.said[event.text_until :])):
            return None
        left = self.script.split(event.text_until)
        return left if left.written else None

    def leave(self, heard: int) -> Script | None:
        """It ends where its listener left it, after `heard` samples. Returns the text that was not heard, None if there is none."""
        self.reason = "unheard"
        left = self.script.split(self._spoken.heard(self.script.said, heard))
        return left if left.written else None

    def heard_chars(self, heard: int) -> int:
        """An estimate of the characters heard with `heard` samples, cut back to a word's end."""
        return self.script.written_until(self._spoken.heard(self.script.said, heard))
