"""Tap: keeps what the engine made for each utterance as a WAV file, for tests and bug reports. Off unless `tap` is configured."""

from __future__ import annotations

import wave
from pathlib import Path

from gateway.media.opus import RATE


class Tap:
    """The recorder of one utterance, SESSION-UTTERANCE.wav in `folder`; the file is there before the utterance is reported done."""

    def __init__(self, folder: str, session: str, utterance: int) -> None:
        self._path = Path(folder) / f"{session}-{utterance}.wav"
        self._pcm = bytearray()

    def add(self, pcm: bytes) -> None:
        """More s16le audio."""
        self._pcm += pcm

    def save(self) -> None:
        """Write the file. Blocks: call it in a thread."""
        with wave.open(str(self._path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(self._pcm)
