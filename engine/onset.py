"""OnsetTrim: drops the silence before an utterance's first sound, as its samples come."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 0.010
# A window louder than this is sound; the quietest consonants at normal level lie well above it.
THRESHOLD_DBFS = -50.0
# A decoder may begin with a click, louder than that in the first window alone (the embedded voice's at -49 dBFS): no sound unless it goes on.
CLICK_DBFS = -40.0
# Kept before the first loud window, so that a soft beginning is not cut.
KEEP_S = 0.030
MOST_S = 0.400


class OnsetTrim:
    """Feed int16 samples in order to `push`; until the first sound it returns nothing or what must be kept, afterwards all of it.

    At most `MOST_S` are dropped and never a window that holds sound. `dropped` counts samples."""

    def __init__(self, sample_rate: int) -> None:
        self.dropped = 0
        self._open = False
        self._window = round(WINDOW_S * sample_rate)
        self._keep = round(KEEP_S * sample_rate)
        self._most = round(MOST_S * sample_rate)
        self._threshold, self._click = (32768.0 * math.pow(10.0, dbfs / 20.0) for dbfs in (THRESHOLD_DBFS, CLICK_DBFS))
        self._held: NDArray[np.int16] = np.zeros(0, np.int16)

    def push(self, samples: NDArray[np.int16]) -> NDArray[np.int16]:
        """The samples that are to be heard, now that these have come."""
        if self._open:
            return samples
        held = np.concatenate((self._held, samples))
        whole = len(held) // self._window
        loudness = np.sqrt(np.square(held[: whole * self._window].reshape(whole, self._window).astype(np.float32)).mean(1))
        if self.dropped == 0 and whole and self._threshold < loudness[0] <= self._click:
            if whole == 1:
                self._held = held
                return held[:0]
            if loudness[1] <= self._threshold:
                loudness[0] = 0.0
        loud = np.flatnonzero(loudness > self._threshold)
        # Windows are taken from the start of what is held, so a part of one may hold sound nobody has looked at: it stays held.
        silent = int(loud[0]) * self._window if len(loud) else whole * self._window
        room = self._most - self.dropped
        drop = min(max(0, silent - self._keep), room)
        self.dropped += drop
        if len(loud) or drop == room:
            self._open = True
            self._held = held[:0]
            return held[drop:]
        self._held = held[drop:]
        return held[:0]

    def flush(self) -> NDArray[np.int16]:
        """The utterance has ended: what is still held, all of it quiet."""
        held, self._held = self._held, self._held[:0]
        self._open = True
        return held
