"""Listener: what somebody hears of PCM that arrives in pieces. Pure; time comes in as `at_s`."""

from __future__ import annotations

import math

import numpy as np

WINDOW_S, HOP_S = 0.020, 0.010
AUDIBLE_DBFS = -45.0
IN_A_ROW = 2
"""Windows above the level that make a sound: one alone may be a click."""


class Listener:
    """Feed s16le mono to `hear` in order. The first sample is played the moment it comes, or `buffer_s` later. Times are those of the
    caller's clock; None is what has not happened."""

    def __init__(self, sample_rate: int, buffer_s: float = 0.0, *, keep: bool = False) -> None:
        self.kept = bytearray() if keep else None
        """All that came, if it is wanted."""
        self.first_s: float | None = None
        """When the first byte came."""
        self.audible_s: float | None = None
        """When the bytes had come that make the first sound: so many windows in a row above the level."""
        self.lead_s = 0.0
        """Silence before the first sound, which a listener has to sit through besides."""
        self.last_s: float | None = None
        self.underruns = 0
        """How often the sound stopped because the next had not come."""
        self.gap_s = 0.0
        """For how long, all together."""
        self.dry_s = 0.0
        """When all that has come will have been heard."""
        self.bytes = 0
        self._rate = sample_rate
        self._buffer_s = buffer_s
        self._window, self._hop = round(WINDOW_S * sample_rate), round(HOP_S * sample_rate)
        self._level = 32768.0 * math.pow(10.0, AUDIBLE_DBFS / 20.0)
        self._unheard = bytearray()
        self._windows = self._loud = 0

    @property
    def audio_s(self) -> float:
        return self.bytes // 2 / self._rate

    def hear(self, pcm: bytes, at_s: float) -> None:
        if not pcm:
            return
        if self.first_s is None:
            self.first_s = at_s
            self.dry_s = at_s + self._buffer_s
        elif at_s > self.dry_s:
            self.underruns += 1
            self.gap_s += at_s - self.dry_s
            self.dry_s = at_s
        self.dry_s += len(pcm) / 2 / self._rate
        self.bytes += len(pcm)
        self.last_s = at_s
        if self.kept is not None:
            self.kept += pcm
        if self.audible_s is None:
            self._unheard += pcm
            self._look(at_s)

    def _look(self, at_s: float) -> None:
        """Windows that are whole by now, until the first sound."""
        samples = np.frombuffer(bytes(self._unheard[: len(self._unheard) // 2 * 2]), "<i2").astype(np.float32)
        begin = 0
        while begin + self._window <= len(samples):
            loud = float(np.sqrt(np.square(samples[begin : begin + self._window]).mean())) > self._level
            self._loud = self._loud + 1 if loud else 0
            self._windows += 1
            begin += self._hop
            if self._loud == IN_A_ROW:
                self.audible_s = at_s
                self.lead_s = (self._windows - IN_A_ROW) * self._hop / self._rate
                self._unheard.clear()
                return
        del self._unheard[: begin * 2]
