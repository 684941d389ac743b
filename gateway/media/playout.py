"""Playout: an estimate of what a WebSocket's listener has heard, from what was sent and when. Pure; positions are samples.

It assumes that a listener plays in real time from the first sample on, and waits in silence when it has nothing left."""

from __future__ import annotations


class Playout:
    """The playhead of one line. Utterances follow each other in the order in which they are first sent."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._sent = 0
        self._dry_at_s = float("-inf")
        self._spans: dict[int, tuple[int, int]] = {}

    def sent(self, utterance: int, samples: int, now_s: float) -> None:
        """`samples` more of `utterance` have left."""
        start, count = self._spans.get(utterance, (self._sent, 0))
        self._spans[utterance] = (start, count + samples)
        self._sent += samples
        self._dry_at_s = max(self._dry_at_s, now_s) + samples / self._rate

    def measured(self, now_s: float) -> bool:
        """Never: it is all an estimate."""
        return False

    def buffered_s(self, now_s: float) -> float:
        """What was sent and not heard yet."""
        return max(self._dry_at_s - now_s, 0.0)

    def heard(self, utterance: int, now_s: float) -> int:
        """Samples of `utterance` heard by now."""
        if utterance not in self._spans:
            return 0
        start, count = self._spans[utterance]
        return min(max(self._playhead(now_s) - start, 0), count)

    def playing(self, utterance: int, now_s: float) -> bool:
        """Whether sound of `utterance` is running now."""
        if utterance not in self._spans or self.dry(now_s):
            return False
        start, count = self._spans[utterance]
        return start <= self._playhead(now_s) < start + count

    def dry(self, now_s: float) -> bool:
        """Whether all that was sent has been played."""
        return now_s >= self._dry_at_s

    def cut(self, now_s: float) -> None:
        """The listener throws away what it has not played yet."""
        self._sent = self._playhead(now_s)
        self._dry_at_s = min(self._dry_at_s, now_s)
        self._spans = {number: (start, min(count, max(self._sent - start, 0))) for number, (start, count) in self._spans.items()}

    def forget(self, utterance: int) -> None:
        """No more questions about `utterance` will come."""
        self._spans.pop(utterance, None)

    def _playhead(self, now_s: float) -> int:
        return self._sent - round(max(self._dry_at_s - now_s, 0.0) * self._rate)
