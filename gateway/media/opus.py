"""OpusEncoder: 24 kHz mono PCM to 20 ms Opus packets through PyAV, which lets go of the GIL while it encodes."""

from __future__ import annotations

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
        samples = np.frombuffer(pcm, dtype="<i2")
        packets: list[bytes] = []
        for start in range(0, len(samples), PACKET_SAMPLES):
            frame = av.AudioFrame.from_ndarray(samples[start : start + PACKET_SAMPLES].reshape(1, -1), format="s16", layout="mono")
            frame.sample_rate = RATE
            frame.time_base = _TIME_BASE
            frame.pts = self._position
            self._position += PACKET_SAMPLES
            packets.extend(bytes(packet) for packet in self._context.encode(frame))
        return packets
