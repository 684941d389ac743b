"""Playout: what a WebSocket's listener has heard, by its own word, or by estimate from what was sent and when. Pure; positions are samples.

The estimate is a listener that plays in real time from the first sample on, and waits in silence when it has nothing left. No word makes
one look nearer to running dry than that."""

from __future__ import annotations

STALE_S = 2.0
"""A report older than this is no news; the estimate runs on from it."""


class Playout:
    """The playhead of one line. Utterances follow each other in the order in which they are first sent."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._sent = 0
        self._dry_at_s = float("-inf")
        self._soonest_dry_at_s = float("-inf")
        """Of a listener that has never waited without need."""
        self._reported_s = float("-inf")
        self._position = -1
        """As it said last."""
        self._stands = False
        self._in_hand_s = 0.0
        self._spans: dict[int, tuple[int, int]] = {}

    def sent(self, utterance: int, samples: int, now_s: float) -> None:
        """`samples` more of `utterance` have left."""
        start, count = self._spans.get(utterance, (self._sent, 0))
        self._spans[utterance] = (start, count + samples)
        self._sent += samples
        self._dry_at_s = max(self._dry_at_s, now_s) + samples / self._rate
        self._soonest_dry_at_s = max(self._soonest_dry_at_s, now_s) + samples / self._rate

    def report(self, utterance: int, played: int, in_hand_s: float, now_s: float) -> None:
        """The listener has played so many samples of `utterance`, and has so much behind them. What cannot be is not believed: more than was
        sent, faster than time, or backwards."""
        if utterance not in self._spans:
            return
        start, count = self._spans[utterance]
        soonest = self._sent - round(max(self._soonest_dry_at_s - now_s, 0.0) * self._rate)
        position = min(start + min(played, count), soonest)
        if position < self._position:
            return
        self._stands = position == self._position and position < self._sent and now_s > self._reported_s
        self._position, self._reported_s = position, now_s
        self._dry_at_s = now_s + (self._sent - position) / self._rate
        self._in_hand_s = min(in_hand_s, (self._sent - position) / self._rate)

    def measured(self, now_s: float) -> bool:
        """Whether the listener itself has said where it is, not long ago."""
        return now_s - self._reported_s < STALE_S

    def buffered_s(self, now_s: float) -> float:
        """What the listener has and has not heard yet: what it says, or else all that was sent."""
        if not self.measured(now_s):
            return self.unplayed_s(now_s)
        return max(self._in_hand_s - (0.0 if self._stands else now_s - self._reported_s), 0.0)

    def unplayed_s(self, now_s: float) -> float:
        """What was sent and not heard yet."""
        return (self._sent - self._playhead(now_s)) / self._rate

    def heard(self, utterance: int, now_s: float) -> int:
        """Samples of `utterance` heard by now."""
        if utterance not in self._spans:
            return 0
        start, count = self._spans[utterance]
        return min(max(self._playhead(now_s) - start, 0), count)

    def playing(self, utterance: int, now_s: float) -> bool:
        """Whether sound of `utterance` is running now."""
        if utterance not in self._spans or self.dry(now_s) or (self._stands and self.measured(now_s)):
            return False
        start, count = self._spans[utterance]
        return start <= self._playhead(now_s) < start + count

    def dry(self, now_s: float) -> bool:
        """Whether all that was sent has been played."""
        return self._playhead(now_s) >= self._sent

    def cut(self, now_s: float) -> None:
        """The listener throws away what it has not played yet."""
        self._sent = self._playhead(now_s)
        self._dry_at_s = min(self._dry_at_s, now_s)
        self._soonest_dry_at_s = min(self._soonest_dry_at_s, now_s)
        self._position, self._stands, self._in_hand_s = min(self._position, self._sent), False, 0.0
        self._spans = {number: (start, min(count, max(self._sent - start, 0))) for number, (start, count) in self._spans.items()}

    def forget(self, utterance: int) -> None:
        """No more questions about `utterance` will come."""
        self._spans.pop(utterance, None)

    def _playhead(self, now_s: float) -> int:
        if self._stands:
            # Whoever stood still and says nothing any more is taken to play on.
            now_s = self._reported_s + max(0.0, now_s - self._reported_s - STALE_S)
        return self._sent - round(max(self._dry_at_s - now_s, 0.0) * self._rate)
