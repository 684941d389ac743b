"""A test engine: the real loop, scheduler and ZeroMQ service, with a WAV file where the model would be.

Every utterance plays the file from its start, however its text is cut; it ends with the file once its text has ended. Run as
`python -m tests.wav_engine --wav speech.wav --endpoint ipc://...`; the file is mono s16 at 24 kHz (espeak-ng through sox)."""

from __future__ import annotations

import argparse
import logging
import time
import wave
from pathlib import Path

import numpy as np

from engine.__main__ import EMBEDDED_VOICE
from engine.config import LATENCY, EngineConfig
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.service import run
from engine.stages import Stages


class WavStages(Stages):
    """The embedded voice's tokenizer, prompts and slots; sound from `samples` (int16, 24 kHz). `frame_cost_s` is slept per codec frame."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, samples: np.ndarray, frame_cost_s: float = 0.0) -> None:
        super().__init__(checkpoint, config)
        self.per_frame = checkpoint.config.codec.samples_per_frame
        self.frames = -(-len(samples) // self.per_frame)
        self.samples = np.zeros(self.frames * self.per_frame, np.int16)
        self.samples[: len(samples)] = samples
        self.frame_cost_s = frame_cost_s

    def talker(self, rows: list[int]) -> list[int | None]:
        tokens: list[int | None] = []
        for slot in rows:
            over = self.slots.steps[slot] >= self.frames and bool(self.slots.may_end[slot])
            self.slots.steps[slot] += not over
            # Each another one, or the guard would take a long file for a voice that has got stuck.
            tokens.append(None if over else int(self.slots.steps[slot]))
        return tokens

    def predictor(self, rows: list[int]) -> None:
        pass

    def codec(self, rows: list[int], first: list[int], frames: int) -> list[np.ndarray | None]:
        time.sleep(self.frame_cost_s * frames)
        out: list[np.ndarray | None] = []
        for start in first:
            pcm = np.zeros(frames * self.per_frame, np.int16)
            part = self.samples[start * self.per_frame : (start + frames) * self.per_frame]
            pcm[: len(part)] = part
            out.append(pcm)
        return out


def read_wav(path: Path) -> np.ndarray:
    """Mono s16 samples at 24 kHz. Raises ValueError for another format."""
    with wave.open(str(path)) as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, 24000):
            raise ValueError(f"{path}: expected mono s16 at 24 kHz")
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wav", type=Path, required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--frame-cost", type=float, default=0.002, help="seconds slept for each codec frame")
    parser.add_argument("--trace", type=Path, help="where to leave the launches, as JSON lines, at the end")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    run(
        arguments.endpoint,
        WavStages(load_checkpoint(EMBEDDED_VOICE), LATENCY, read_wav(arguments.wav), arguments.frame_cost),
        LATENCY,
        arguments.trace,
    )


if __name__ == "__main__":
    main()
