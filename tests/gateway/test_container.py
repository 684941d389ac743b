"""Files of speech, written as it comes: what decoders make of them."""

from __future__ import annotations

import io
import struct
import subprocess
import wave
from pathlib import Path

import av
import numpy as np
import pytest

from gateway.media.container import FORMATS, container
from tests.gateway.stand_in import RATE, speech

CHUNK = 1920
ODD = 2 * RATE + 777
"""A length that fills no format's last frame."""


def write(name: str, samples: np.ndarray, size: int | None = None) -> tuple[bytes, list[int]]:
    """The file, and how long it was after each chunk."""
    file = container(name, size)
    data, lengths = b"", []
    for start in range(0, len(samples), CHUNK):
        data += file.add(samples[start : start + CHUNK].tobytes())
        lengths.append(len(data))
    return data + file.end(), lengths


def read(data: bytes, kind: str | None = None) -> tuple[np.ndarray, int]:
    with av.open(io.BytesIO(data), format=kind) as file:
        frames = [frame.to_ndarray() for frame in file.decode(audio=0)]
        rate = file.streams.audio[0].rate
    samples = np.concatenate([frame.reshape(-1) for frame in frames])
    return (samples.astype(np.float64) / 32768 if samples.dtype == np.int16 else samples.astype(np.float64)), rate


@pytest.mark.parametrize(("name", "least"), [("opus", 0.9), ("mp3", 0.95), ("aac", 0.95), ("flac", 1.0)])
def test_a_decoder_gives_back_what_went_in(name: str, least: float) -> None:
    made = speech()[:ODD]
    heard, rate = read(write(name, made)[0])
    heard = heard[:: rate // RATE]
    delay = 0 if name in ("opus", "flac") else int(np.argmax(np.correlate(heard[: 3 * 4800], made[:4800].astype(np.float64), "valid")))
    assert len(heard) >= len(made) and delay <= 2200, "samples are missing"
    if name in ("opus", "flac"):
        assert len(heard) == len(made), "pre-skip or the last granule position is wrong"
    assert np.corrcoef(heard[delay : delay + len(made)], made[: len(heard) - delay])[0, 1] >= least - 1e-9


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_leave_as_they_come(name: str) -> None:
    lengths = write(name, speech()[: 2 * RATE])[1]
    assert lengths[1] > 0, "nothing after 160 ms"
    # FLAC's blocks are the longest.
    assert all(later > earlier for earlier, later in zip(lengths[1:], lengths[4:], strict=False))


def test_ogg_pages() -> None:
    data, _ = write("opus", speech()[:ODD])
    pages = []
    while data:
        magic, _, kind, granule, _, number, _, segments = struct.unpack("<4sBBqIIIB", data[:27])
        assert magic == b"OggS" and number == len(pages)
        size = sum(data[27 : 27 + segments])
        pages.append((kind, granule, data[27 + segments : 27 + segments + size]))
        data = data[27 + segments + size :]
    assert pages[0][0] == 2 and pages[0][2].startswith(b"OpusHead") and pages[1][2].startswith(b"OpusTags")
    _, _, skip, rate = struct.unpack("<BBHI", pages[0][2][8:16])
    # 6.5 ms at 48 kHz: the encoder's own delay.
    assert (skip, rate) == (312, RATE)
    granules = [granule for _, granule, _ in pages[2:]]
    assert granules[:-1] == [960 * (i + 1) for i in range(len(granules) - 1)]
    assert granules[-1] == 2 * ODD + skip and pages[-1][0] == 4


@pytest.mark.parametrize("known", [True, False])
def test_wav_headers_are_taken(tmp_path: Path, known: bool) -> None:
    made = speech()[:ODD]
    data, _ = write("wav", made, 2 * ODD if known else None)
    assert len(data) == 44 + 2 * ODD
    heard, rate = read(data)
    assert rate == RATE and np.array_equal(np.round(heard * 32768), made)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        assert file.readframes(10 * RATE) == made.tobytes()
        assert not known or file.getnframes() == ODD
    (tmp_path / "in.wav").write_bytes(data)
    raw = subprocess.run(["sox", str(tmp_path / "in.wav"), "-t", "raw", "-"], check=True, capture_output=True).stdout
    assert raw == made.tobytes()
