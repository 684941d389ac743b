"""Sound that spells its text: each letter is a tone of its own, so that a recording can be read. Pure mathematics, no browser."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from tests.browser.matching import RATE, Signal
from tests.gateway.stand_in import SAMPLES_PER_CHAR, StandInEngine

AMPLITUDE = 0.5
RAMP_S = 0.004
WINDOW_S, HOP_S = 0.06, 0.02
LOUD = 0.5
"""Of AMPLITUDE: a tone that is there, and not on its way in or out."""


def pitch(letter: str) -> float:
    """Hz; a is 400, and each letter 100 higher than the one before."""
    return 400.0 + 100.0 * (ord(letter) - ord("a"))


class Speller(StandInEngine):
    """Spells what it is to say, a letter in 60 ms. Anything but a small letter is silence."""

    def sound(self, text: str, first: int, count: int) -> NDArray[np.int16]:
        """See StandInEngine."""
        places = np.arange(first, first + count)
        pitches = np.array([pitch(text[at]) if "a" <= text[at] <= "z" else 0.0 for at in places // SAMPLES_PER_CHAR])
        within_s = places % SAMPLES_PER_CHAR / RATE
        edge = np.minimum(within_s, SAMPLES_PER_CHAR / RATE - within_s)
        tones = np.sin(2 * np.pi * pitches * within_s) * np.minimum(edge / RAMP_S, 1.0)
        return np.asarray(np.round(tones * AMPLITUDE * 32767), dtype=np.int16)


def levels(recording: Signal, letters: str) -> NDArray[np.float64]:
    """How loud each of these letters' tones is in a recording at RATE: a row for every HOP_S, 1 is as loud as it was made."""
    window = round(WINDOW_S * RATE)
    hann = np.hanning(window)
    times_s = np.arange(window) / RATE
    tones = np.exp(-2j * np.pi * np.outer(times_s, [pitch(letter) for letter in letters])) * hann[:, None]
    padded = np.pad(recording, window)
    starts = range(0, len(padded) - window, round(HOP_S * RATE))
    return np.abs(np.stack([padded[at : at + window] for at in starts]) @ tones) * 2 / hann.sum() / AMPLITUDE


def read(recording: Signal, letters: str) -> str:
    """What a recording spells in these letters, as `once` would have it."""
    found = levels(recording, letters)
    loudest = found.argmax(axis=1)
    return once("".join(letters[loudest[at]] for at in range(len(found)) if found[at, loudest[at]] > LOUD))


def once(text: str) -> str:
    """A text without its spaces, and each letter once however often it is repeated."""
    return "".join(letter for letter, _ in itertools.groupby(text.replace(" ", "")))
