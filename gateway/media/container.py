"""Containers: a stream of PCM as the bytes of a file, as it comes. What a format needs at its end comes from `end`.

Nothing waits for the length: a WAV header of a stream says that it is unknown, and Ogg pages, MP3, FLAC and ADTS frames leave one by
one. Encoding takes a few per cent of the time speech takes, so callers run what `encodes` in a thread."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Literal, Protocol, get_args

import av
import numpy as np

from gateway.media.opus import RATE

AudioFileFormat = Literal["pcm", "wav", "opus", "mp3", "flac", "aac"]
FORMATS: tuple[AudioFileFormat, ...] = get_args(AudioFileFormat)
UNKNOWN_SIZE = 0xFFFFFFFF
"""In a WAV header: read to the end. FFmpeg, and so browsers, mpv and VLC's kin, SoX and Python's wave module take it so."""
_TIME_BASE = Fraction(1, RATE)


class Container(Protocol):
    """A file in the making. Not thread-safe: one call at a time."""

    content_type: str
    encodes: bool
    """Whether `add` and `end` do more than pass the samples on."""

    def add(self, pcm: bytes) -> bytes:
        """More s16le audio; returns the bytes that are ready."""

    def end(self) -> bytes:
        """The audio is complete; returns the file's last bytes."""


class RawPcm:
    """s16le, 24 kHz, mono, without a header."""

    content_type = "audio/pcm"
    encodes = False

    def add(self, pcm: bytes) -> bytes:
        """See Container."""
        return pcm

    def end(self) -> bytes:
        """See Container."""
        return b""


class Wav:
    """RIFF WAVE around the same samples. `size`: bytes of audio to come, if that is known."""

    content_type = "audio/wav"
    encodes = False

    def __init__(self, size: int | None = None) -> None:
        riff, data = (UNKNOWN_SIZE, UNKNOWN_SIZE) if size is None else (size + 36, size)
        form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
        self._head = b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", data)

    def add(self, pcm: bytes) -> bytes:
        """See Container."""
        head, self._head = self._head, b""
        return head + pcm

    def end(self) -> bytes:
        """See Container."""
        return self.add(b"")


class _Sink:
    """What PyAV writes to. It has no `seek`, so that no muxer goes back to fill in a length."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> int:
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        taken, self._bytes = bytes(self._bytes), bytearray()
        return taken


class Encoded:
    """A compressed file through PyAV. FFmpeg's Ogg muxer sets Opus' pre-skip and granule positions, the last page's included, so that
    a decoder gives back exactly the samples that went in."""

    encodes = True

    def __init__(self, content_type: str, muxer: str, codec: str, bit_rate: int | None, mux: dict[str, str], options: dict[str, str]) -> None:
        self.content_type = content_type
        self._sink = _Sink()
        self._file = av.open(self._sink, "w", format=muxer, options=mux | {"flush_packets": "1"})
        stream = self._file.add_stream(codec, rate=RATE, layout="mono", options=options)
        # PyAV's types know the kind of stream only for codecs named in the source.
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        self._position = 0

    def add(self, pcm: bytes) -> bytes:
        """See Container."""
        samples = np.frombuffer(pcm, dtype="<i2").reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = RATE, _TIME_BASE, self._position
        self._position += samples.shape[1]
        self._file.mux(self._stream.encode(frame))
        return self._sink.take()

    def end(self) -> bytes:
        """See Container."""
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.take()


def container(name: AudioFileFormat, size: int | None = None) -> Container:
    """A new file of this format. `size`: bytes of s16le audio to come, if known."""
    match name:
        case "pcm":
            return RawPcm()
        case "wav":
            return Wav(size)
        case "opus":
            # A page a packet: a page of FFmpeg's usual second would hold the first word back for so long.
            return Encoded("audio/ogg", "ogg", "libopus", 32_000, {"page_duration": "20000"}, {"application": "audio", "frame_duration": "20"})
        case "mp3":
            # No Xing frame, which tells a length, and no tag before the sound.
            return Encoded("audio/mpeg", "mp3", "libmp3lame", 64_000, {"write_xing": "0", "id3v2_version": "0"}, {})
        case "flac":
            return Encoded("audio/flac", "flac", "flac", None, {}, {})
        case "aac":
            return Encoded("audio/aac", "adts", "aac", 64_000, {}, {})
