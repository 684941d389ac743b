"""OpusEncoder: 24 kHz mono PCM to 20 ms Opus packets through PyAV, which lets go of the GIL while it encodes."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction

import av
import numpy as np

RATE = 24000
PACKET_S = 0.02
PACKET_SAMPLES = 480
PACKET_BYTES = 2 * PACKET_SAMPLES
LOOKAHEAD_SAMPLES = 156
"""The decoder's output lags the encoder's input by this much (6.5 ms), so speech needs as much silence behind it."""

_BIT_RATE = 32000
_COMPLEXITY = 5
_TIME_BASE = Fraction(1, RATE)
_libc = ctypes.CDLL(None)


class OpusEncoder:
    """One continuous Opus stream. Not thread-safe: one `encode` at a time."""

    def __init__(self) -> None:
        context = av.CodecContext.create("libopus", "w")
        context.sample_rate = RATE
        context.layout = "mono"
        context.format = "s16"
        context.bit_rate = _BIT_RATE
        context.time_base = _TIME_BASE
        # FFmpeg calls Opus' complexity compression_level.
        context.options = {"application": "audio", "frame_duration": "20", "compression_level": str(_COMPLEXITY)}
        context.open()
        self._context = context
        self._position = 0

    def encode(self, pcm: bytes) -> list[bytes]:
        """Whole 20 ms frames of s16le to as many packets."""
        frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm, dtype="<i2").reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = RATE
        frame.time_base = _TIME_BASE
        frame.pts = self._position
        # PyAV has a filter cut the frame into packets, and makes it now. All in one call costs a fifth less than packet by packet.
        with nullcontext() if self._position else _on_one_processor():
            packets = self._context.encode(frame)
        self._position += frame.samples
        return [bytes(packet) for packet in packets]


@contextmanager
def _on_one_processor() -> Iterator[None]:
    """FFmpeg gives each filter as many threads as there are processors for the thread that makes it, up to 16. Those of an encoder would
    never have anything to do, and there is one for each listener."""
    if sys.platform != "linux":
        yield
        return
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_libc.sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)
