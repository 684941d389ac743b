"""Comparing what was heard with what the engine made."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.signal import correlate, resample_poly


def align(heard_48k: NDArray[np.int16], made_24k: bytes) -> tuple[int, list[float]]:
    """Where in what was heard (sample at 24 kHz) the made audio begins, and the correlation of each 200 ms window of it there.

    Windows of near silence are left out: Opus owes nothing to their waveform."""
    heard = resample_poly(heard_48k.astype(np.float64), 1, 2)
    made = np.frombuffer(made_24k, dtype="<i2").astype(np.float64)
    head = made[: 24000 * 2]
    lag = int(np.argmax(correlate(heard, head, mode="valid"))) if len(heard) >= len(head) else 0
    window = 4800
    loud = np.sqrt(np.mean(made**2)) * 0.1
    scores = []
    for start in range(0, len(made) - window + 1, window):
        ours, theirs = made[start : start + window], heard[lag + start : lag + start + window]
        if np.sqrt(np.mean(ours**2)) < loud:
            continue
        scores.append(float(np.corrcoef(ours, theirs)[0, 1]) if len(theirs) == window else 0.0)
    return lag, scores
