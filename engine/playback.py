"""PlaybackClock: what one listener has heard and when the audio in hand runs out. Pure arithmetic on samples and seconds."""

from __future__ import annotations


class PlaybackClock:
    """Follows one utterance. Without reports, playback is taken to start when the first chunk leaves and to run in real time;
    it stands still while the listener is dry. Every method takes the time as `now_s` (monotonic seconds)."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.emitted = 0
        self.measured = False
        self.dry_s: float | None = None
        """When the listener runs out, as long as nothing else is emitted or reported; None where that moves with the time."""
        self._heard = 0
        self._at_s = 0.0
        self._playing = False
        self._reported = False

    def emit(self, samples: int, now_s: float) -> None:
        """`samples` more have left the engine."""
        first = self.emitted == 0
        self._heard, self._at_s = self.heard(now_s), now_s
        self.emitted += samples
        if first and not self._reported:
            self._playing = True
        self._foresee()

    def report(self, heard: int, playing: bool, measured: bool, now_s: float) -> None:
        """The gateway's word: `heard` samples so far, clock running or not. A position that was never emitted counts as all of it."""
        self._heard, self._at_s, self._playing = min(max(heard, 0), self.emitted), now_s, playing
        self.measured, self._reported = measured, True
        self._foresee()

    def _foresee(self) -> None:
        self.dry_s = self._at_s + (self.emitted - self._heard) / self.sample_rate if self._playing else None

    def heard(self, now_s: float) -> int:
        """Samples heard by now."""
        if not self._playing:
            return self._heard
        return min(self.emitted, self._heard + int(max(0.0, now_s - self._at_s) * self.sample_rate))

    def buffered_s(self, now_s: float) -> float:
        """Audio that has left the engine and was not heard yet."""
        return (self.emitted - self.heard(now_s)) / self.sample_rate

    def dry_at(self, now_s: float) -> float:
        """When the listener runs out. A listener who is paused may resume at any moment, so counts as resuming now."""
        return now_s + self.buffered_s(now_s) if self.dry_s is None else self.dry_s
