"""Is a recording what the engine made? Pure mathematics on two signals, no browser.

The recording must hold the reference whole, undistorted and without any shift in time: the yardstick of every test of sound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.signal import correlate, resample_poly

Signal = npt.NDArray[np.float64]

RATE = 24000
WINDOW_S = 0.2
HEAD_S = 0.3
MIN_CORRELATION = 0.9
LAG_TOLERANCE_S = 0.01
SEARCH_S = 0.06
SILENT = 0.02
"""A stretch is silent below this share of the loudest 200 ms (-34 dB)."""
DROPOUT_S = 0.02
GAP_S = 0.01
"""An audio context of Chromium's that is a moment too early takes a block of zeros from a track, and all that follows later by that: the track
itself and a loudspeaker have none (docs/measurements/gateway.md)."""
QUIET = 2
"""Samples of 16 bits up to this may be zero by themselves for a while."""
DROPOUT_SHARE = 0.1
"""A 20 ms frame is lost where less than this share of the reference's amplitude is left (-20 dB)."""


@dataclass(frozen=True)
class Window:
    """One stretch of the reference, compared."""

    at_s: float
    correlation: float
    """The best within half the lag tolerance of the recording's own lag."""
    lag_s: float
    """Where it would fit best, in a wider search."""


@dataclass(frozen=True)
class Match:
    """How a recording compares with its reference."""

    lag_s: float
    """Where in the recording the reference begins."""
    windows: list[Window]
    head: list[Window]
    """The first 300 ms of sound, in steps of 50 ms."""
    dropouts_s: list[float]
    """Where in the reference 20 ms or more are missing."""

    @property
    def worst(self) -> float:
        """The lowest correlation of all windows."""
        return min((window.correlation for window in self.windows), default=0.0)

    @property
    def lag_spread_s(self) -> float:
        """How far the windows' own best lags lie apart."""
        lags = [window.lag_s for window in self.windows]
        return max(lags) - min(lags) if lags else 0.0

    def problems(self) -> list[str]:
        """What is wrong with the recording, in words; empty if nothing is."""
        found = [
            f"{name} at {window.at_s:.2f} s: correlation {window.correlation:.3f}"
            for name, windows in (("head", self.head), ("window", self.windows))
            for window in windows
            if window.correlation < MIN_CORRELATION
        ]
        found += [f"dropout at {at_s:.2f} s" for at_s in self.dropouts_s]
        if not self.windows:
            found.append("the reference is silent or not in the recording")
        elif self.lag_spread_s > LAG_TOLERANCE_S:
            found.append(f"the lag wanders by {self.lag_spread_s * 1000:.1f} ms")
        return found


def without_gaps(samples: npt.NDArray[np.int16], rate: int) -> npt.NDArray[np.int16]:
    """A 16-bit recording by an audio context, without the blocks of zeros in mid-sound that it alone has. Nothing else is left out: where sound
    is missing, or is zero for any other length, it stays so."""
    sounding = np.flatnonzero(samples)
    # Of more zeros than a block, those at its edge are the sound's own.
    owned = np.diff(sounding) - 1 - round(GAP_S * rate)
    kept, until = [], 0
    for place in np.flatnonzero((owned >= 0) & (owned <= 2)):
        first, following = sounding[place], sounding[place + 1]
        if max(abs(int(samples[first])), abs(int(samples[following]))) > QUIET:
            kept.append(samples[until : first + 1])
            until = following - owned[place]
    return np.concatenate([*kept, samples[until:]])


def resample(samples: npt.ArrayLike, rate: int) -> Signal:
    """A 16-bit signal at RATE, as floats from -1 to 1."""
    signal = np.asarray(samples, dtype=np.float64) / 32768
    return signal if rate == RATE else np.asarray(resample_poly(signal, RATE, rate), dtype=np.float64)


def match(reference: Signal, recording: Signal) -> Match:
    """Find the reference in the recording and compare them stretch by stretch. Both at RATE."""
    margin = round(SEARCH_S * RATE)
    lag = find(reference, recording)
    # The recording as it lies under the reference, with room for the search on either side.
    under = np.zeros(len(reference) + 2 * margin)
    first, last = max(0, lag - margin), min(len(recording), lag + len(reference) + margin)
    under[first - (lag - margin) : last - (lag - margin)] = recording[first:last]

    window = round(WINDOW_S * RATE)
    loudest = max((rms(reference[at : at + window]) for at in range(0, max(1, len(reference) - window), window // 2)), default=0.0)
    floor = SILENT * loudest
    windows = [
        compare(reference, under, at, window) for at in range(0, len(reference) - window + 1, window // 2) if rms(reference[at : at + window]) > floor
    ]

    frame = round(DROPOUT_S * RATE)
    step = frame // 2
    sounding = [at for at in range(0, len(reference) - frame + 1, step) if rms(reference[at : at + frame]) > 2 * floor]
    lost = [at / RATE for at in sounding if rms(under[margin + at : margin + at + frame]) < DROPOUT_SHARE * rms(reference[at : at + frame])]

    head = []
    if sounding:
        short = window // 2
        starts = range(sounding[0], sounding[0] + round(HEAD_S * RATE) - short + 1, short // 2)
        head = [compare(reference, under, at, short) for at in starts if rms(reference[at : at + short]) > floor]
    return Match(lag / RATE, windows, head, lost)


def find(reference: Signal, recording: Signal) -> int:
    """The lag in samples at which the reference lies in the recording."""
    return int(np.argmax(correlate(recording, reference, mode="full", method="fft"))) - len(reference) + 1


def compare(reference: Signal, under: Signal, at: int, length: int) -> Window:
    """Compare one stretch; `under` begins SEARCH_S before the reference does."""
    margin = (len(under) - len(reference)) // 2
    piece = reference[at : at + length]
    around = under[at : at + length + 2 * margin]
    products = correlate(around, piece, mode="valid", method="fft")
    energy = np.concatenate(([0.0], np.cumsum(around**2)))
    norms = np.sqrt(np.maximum(energy[length:] - energy[:-length], 0.0)) * np.linalg.norm(piece)
    correlations = np.divide(products, norms, out=np.zeros_like(products), where=norms > 1e-6)
    near = round(LAG_TOLERANCE_S / 2 * RATE)
    close = correlations[margin - near : margin + near + 1]
    best = int(np.argmax(correlations))
    # A steady vowel fits almost as well one pitch period away: elsewhere only counts where it fits better here and well.
    if correlations[best] - close.max() < 0.02:
        best = margin - near + int(np.argmax(close))
    return Window(at / RATE, float(close.max()), (best - margin) / RATE)


def rms(signal: Signal) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(signal**2))) if len(signal) else 0.0
