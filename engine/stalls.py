"""Stalls: whose text is still coming, and until when one that has none left to speak may wait for more (design 3.2a)."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.model.text import TOKENS_PER_SECOND
from engine.opening import Voice
from engine.scheduler import Scheduler

# A sender who keeps up with speech may stumble this long before its utterance is spoken to the end.
STUMBLE_S = 0.12
# To close a stalled row takes the making of its next frame, and three times as much for neighbours and jitter.
STALL_FRAMES = 4


class Stalls:
    """Of hundreds of utterances most have all of their text: only the others are looked at each turn."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, sample_rate: int) -> None:
        self._config = config
        self._scheduler = scheduler
        self._sample_rate = sample_rate
        self._writing: dict[Voice, None] = {}

    def join(self, voice: Voice) -> None:
        """It has a slot now."""
        if not voice.utterance.text_closed:
            self._writing[voice] = None

    def leave(self, voice: Voice) -> None:
        """It has ended."""
        self._writing.pop(voice, None)

    def overdue(self, now_s: float) -> list[Voice]:
        """Those about to run dry for want of text: each is to be spoken to its end."""
        if not self._writing:
            return []
        for voice in [voice for voice in self._writing if voice.utterance.text_closed]:
            del self._writing[voice]
        stalled = (voice for voice in self._writing if voice.utterance.starved)
        return [voice for voice in stalled if self._due_in(voice, now_s) <= 0]

    def next_in(self, now_s: float) -> float | None:
        """Seconds until the first of them is overdue; None if none waits for text."""
        return min((self._due_in(voice, now_s) for voice in self._writing if voice.utterance.stalled), default=None)

    def _due_in(self, voice: Voice, now_s: float) -> float:
        """Before the first sound nobody runs dry: there the sender has as long as it would have had to begin. Later two are given longer: a
        sender as fast as speech, whose next word should come before the listener runs dry, and the same at the beginning of its sound, where
        nobody has any slack yet, to stumble for a moment."""
        u, text, slack_s = voice.utterance, voice.text, self._config.stall_slack_s
        stumble_s = max(STUMBLE_S, 2 * text.word_s)
        if not u.has_sounded:
            return text.appended_s + (stumble_s if text.at_sentence_end else self._config.idle_flush_s) - now_s
        dry_s = u.playback.dry_at(now_s) - now_s
        if text.tokens_per_s < TOKENS_PER_SECOND:
            return dry_s - slack_s
        if u.samples_emitted < 2 * slack_s * self._sample_rate:
            return max(dry_s - slack_s, text.appended_s + stumble_s - now_s)
        return dry_s - min(slack_s, STALL_FRAMES * self._scheduler.next_frame_s())
