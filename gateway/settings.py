"""Settings: how a session speaks and is heard, and how `session.update` changes that. Pure."""

from __future__ import annotations

import msgspec

from engine import EngineInfo
from gateway.events import Audio, EventError, Listeners, Policy, SessionUpdate, SessionUpdated, Text

AUTO_LANGUAGE = "auto"


class Settings(msgspec.Struct, frozen=True):
    """In force from the next utterance on."""

    voice: str | None
    language: str
    instructions: str
    audio: Audio
    text: Text = Text(clean=True)
    policy: Policy = "queue"
    listeners: Listeners = "replace"

    @classmethod
    def initial(cls, info: EngineInfo) -> Settings:
        """Before the first update: the checkpoint's first voice, the language told from the text, PCM."""
        return cls(next(iter(info.voices), None), AUTO_LANGUAGE, "", Audio("pcm_s16le"))

    def updated(self, update: SessionUpdate, info: EngineInfo, max_chars: int) -> Settings:
        """With the fields that `update` has. Raises EventError for what the checkpoint lacks."""
        instructions = self.instructions if update.instructions is None else update.instructions
        if len(instructions) > max_chars:
            raise EventError("text_too_long", f"instructions: at most {max_chars} characters, these have {len(instructions)}; shorten them")
        if update.audio is not None and (update.audio.format, update.audio.pace) == ("webrtc", "file"):
            raise EventError("invalid_event", "audio.pace: file is for pcm_s16le; a WebRTC listener hears at the pace of time, leave it out")
        audio, policy = update.audio or self.audio, update.policy or self.policy
        if policy == "mix" and audio.format != "webrtc":
            what = "policy: mix sums what sounds at once for a WebRTC listener; set audio.format to webrtc, or choose queue or replace"
            raise EventError("invalid_event", what)
        voice = self.voice if update.voice is None else listed_voice(update.voice, info)
        language = self.language if update.language is None else listed_language(update.language, info)
        return Settings(voice, language, instructions, audio, update.text or self.text, policy, update.listeners or self.listeners)

    def event(self, info: EngineInfo) -> SessionUpdated:
        """What the client is told."""
        own = (self.voice, self.language, self.instructions, self.audio, self.text, self.policy, self.listeners)
        return SessionUpdated(*own, info.voices, _languages(info))


def listed_voice(name: str, info: EngineInfo) -> str:
    """The checkpoint's spelling of a voice. Raises EventError."""
    return _listed(name, info.voices, "voice")


def listed_language(name: str, info: EngineInfo) -> str:
    """The checkpoint's spelling of a language. Raises EventError."""
    return _listed(name, _languages(info), "language")


def _languages(info: EngineInfo) -> list[str]:
    return [AUTO_LANGUAGE, *(name for name in info.languages if name != AUTO_LANGUAGE)]


def _listed(name: str, known: list[str], what: str) -> str:
    for candidate in known:
        if candidate.lower() == name.lower():
            return candidate
    if not known:
        raise EventError(f"unknown_{what}", f"{what}: this checkpoint has none to choose from; leave {what} out")
    raise EventError(f"unknown_{what}", f"{what}: none is called {name[:60]!r}; the checkpoint has: {', '.join(known)}")
