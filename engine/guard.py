"""Guard: notices speech that has gone wrong, so that a listener is not left with a voice that never stops. Pure; numpy only."""

from __future__ import annotations

import math
import unicodedata
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Slowest plausible speech, in seconds a character; ordinary English takes 0.07, a Chinese character 0.2.
LETTER_S = 0.20
IDEOGRAPH_S = 0.60
# A digit may be read as several words.
DIGIT_S = 0.80
SPARE_S = 4.0
SILENCE_DBFS = -60.0
SILENCE_S = 3.0
REPEAT_S = 5.0
LONGEST_CYCLE = 12


def longest_s(text: str) -> float:
    """Seconds in which a text must have been said, whoever says it, beside `SPARE_S`: generous for every script, several
    times the usual. The figures of the parts of a text add up."""
    return sum(map(_longest_s, text), 0.0)


# A text has few different characters, and the way to its first sound leads through here.
@lru_cache(maxsize=4096)
def _longest_s(char: str) -> float:
    category = unicodedata.category(char)
    if category[0] == "N":
        return DIGIT_S
    if category == "Lo":
        return IDEOGRAPH_S
    if category[0] in "LS":
        return LETTER_S
    return LETTER_S * 2 if category[0] == "P" else 0.0


class Guard:
    """Watches one utterance. `hear` takes its samples, `see` its codebook-0 tokens; `verdict` is a reason to end it, or None."""

    def __init__(self, sample_rate: int, frame_s: float) -> None:
        self.verdict: str | None = None
        self._rate = sample_rate
        self._quiet_s = 0.0
        self._silence = 32768.0 * math.pow(10.0, SILENCE_DBFS / 20.0)
        self._span = math.ceil(REPEAT_S / frame_s)
        self._tokens: list[int] = []
        self._same = [0] * LONGEST_CYCLE
        """How many of the latest tokens equal the one 1, 2, .. before them."""

    def hear(self, samples: NDArray[np.int16]) -> None:
        """Near-silence that lasts is no pause any more."""
        if len(samples) == 0:
            return
        wide = samples.astype(np.float32)
        loud = float(np.dot(wide, wide)) > len(wide) * self._silence**2
        self._quiet_s = 0.0 if loud else self._quiet_s + len(samples) / self._rate
        if self._quiet_s >= SILENCE_S:
            self.verdict = self.verdict or "silence"

    def see(self, token: int) -> None:
        """The same few tokens over and over, for seconds, is a loop the model will not leave."""
        if token in self._tokens:
            for before in range(1, min(LONGEST_CYCLE, len(self._tokens)) + 1):
                self._same[before - 1] = self._same[before - 1] + 1 if self._tokens[-before] == token else 0
        else:
            self._same = [0] * LONGEST_CYCLE
        self._tokens.append(token)
        del self._tokens[:-LONGEST_CYCLE]
        if max(self._same) >= self._span:
            self.verdict = self.verdict or "repetition"
