"""SpokenText: which part of an utterance's text has been heard. Pure.

The engine says an upper bound (the text its Talker has eaten runs ahead of the voice); the estimate below it is
proportional: by the utterance's own speed once its length is known, by a usual speaking rate until then."""

from __future__ import annotations

from bisect import bisect_left

USUAL_WEIGHT_PER_S = 15.0
_IDEOGRAPHIC = 0x2E80
_IDEOGRAPH_WEIGHT = 3.5


def weight(text: str) -> float:
    """How long text takes to say, in units of one Latin letter; an ideograph or kana takes several."""
    return sum(_IDEOGRAPH_WEIGHT if ord(char) >= _IDEOGRAPHIC else 1.0 for char in text)


def word_end(text: str, until: int) -> int:
    """The last word end at or before `until`."""
    if until >= len(text):
        return len(text)
    for end in range(until, 0, -1):
        before, after = text[end - 1], text[end]
        if (after.isspace() and not before.isspace()) or ord(before) >= _IDEOGRAPHIC:
            return end
    return 0


class SpokenText:
    """Built up as audio arrives, asked as it is heard. Positions in samples at `rate`."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._ends: list[int] = []
        self._until: list[int] = []
        self._total: int | None = None

    def made(self, end: int, text_until: int) -> None:
        """Audio up to sample `end` exists, for which the engine has taken `text_until` characters."""
        self._ends.append(end)
        self._until.append(text_until)

    def complete(self, total: int) -> None:
        """The utterance is `total` samples long."""
        self._total = total

    def heard(self, text: str, heard: int) -> int:
        """How many characters of `text` have been heard with `heard` samples, cut back to a word's end."""
        if heard <= 0 or not self._ends:
            return 0
        if self._total is not None and heard >= self._total:
            return len(text)
        per_sample = USUAL_WEIGHT_PER_S / self._rate if not self._total else weight(text) / self._total
        left = heard * per_sample
        estimate = 0
        for char in text:
            left -= _IDEOGRAPH_WEIGHT if ord(char) >= _IDEOGRAPHIC else 1.0
            if left < 0:
                break
            estimate += 1
        bound = self._until[min(bisect_left(self._ends, heard), len(self._until) - 1)]
        return word_end(text, min(estimate, bound))
