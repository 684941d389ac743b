"""StandInEngine: speaks engine/messages.py in this process and plays speech made by espeak-ng. No model, no torch.

Its rules are simple enough to test against: an utterance's audio is speech as long as its text, 60 ms a character, in 80 ms
frames; a frame exists once its text is there, for a live listener at most three seconds beyond what is heard, and at most
`credit_s` beyond what was taken. `{fail}` in the text breaks the utterance. A stall of `idle_s` ends it with Done(reason="idle")."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import io
import random
import signal
import subprocess
import time
import wave
from dataclasses import dataclass, field

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray
from scipy.signal import resample_poly

from engine import EngineError
from engine.messages import (
    Append,
    AudioChunk,
    Cancel,
    Credit,
    Done,
    EngineInfo,
    Event,
    Failed,
    Finish,
    Hello,
    Inspect,
    Open,
    Playback,
    SpeechRequest,
    StageCost,
    StageStats,
    Started,
    Stats,
    Welcome,
    decode_command,
    encode,
)

RATE = 24000
FRAME = 1920
SAMPLES_PER_CHAR = RATE * 60 // 1000
AHEAD_S = 3.0
LOOK_EVERY_S = 0.02
SENTENCES = (
    "The quick brown fox jumps over the lazy dog while seven wizards argue about the weather. "
    "She sells sea shells on the sea shore, and nobody has ever asked her for the price of one. "
    "Pack my box with five dozen jugs, then carry it up the hill before the rain begins to fall."
)


@functools.cache
def speech() -> NDArray[np.int16]:
    """Some twenty seconds of speech at 24 kHz, without long silences."""
    made = subprocess.run(["espeak-ng", "-s", "150", "-v", "en", "--stdout", SENTENCES], check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(made)) as file:
        samples = np.frombuffer(file.readframes(1 << 24), dtype="<i2")
        rate = file.getframerate()
    divisor = int(np.gcd(rate, RATE))
    return np.clip(resample_poly(samples.astype(np.float64), RATE // divisor, rate // divisor), -32768, 32767).astype(np.int16)


@dataclass
class Making:
    """One utterance in the stand-in engine."""

    request: SpeechRequest
    text: str = ""
    finished: bool = False
    heard: int = 0
    consumed: int = 0
    made: int = 0
    begun_s: float = 0.0
    cancelled: bool = False
    playbacks: list[Playback] = field(default_factory=list)
    pcm: bytearray = field(default_factory=bytearray)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class StandInEngine:
    """`async with StandInEngine(endpoint) as engine:` answers EngineClients; `engine.utterances` tells what they asked for."""

    info = EngineInfo("stand-in", "stand_in", ["Vivian", "Ryan"], ["english", "german"], RATE, FRAME, 5000, "none")

    def __init__(self, endpoint: str, *, frame_s: float = 0.004, idle_s: float = 0.3, chunk_frames: int = 1) -> None:
        self.endpoint = endpoint
        self.chunk_frames = chunk_frames
        """In a chunk, once the listener has three frames."""
        self.frame_s = frame_s
        self.idle_s = idle_s
        self.credit_s = 60.0
        self.fail_after: int | None = None
        """Once: break the next utterance behind this many characters."""
        self.refusal: EngineError | None = None
        """What utterances are answered with."""
        self.cut_after: int | None = None
        """Once: end the next utterance behind this many characters, for `cut_reason`."""
        self.cut_reason = "idle"
        self.utterances: list[Making] = []
        self._epoch = random.getrandbits(31) + 1
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._by_number: dict[tuple[bytes, int], Making] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> StandInEngine:
        speech()
        self._socket.bind(self.endpoint)
        self._start(self._serve())
        return self

    async def __aexit__(self, *exception: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()

    def _start(self, work: object) -> None:
        task = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, peer: bytes, event: Event) -> None:
        self._socket.send_multipart([peer, encode(event)])

    async def _serve(self) -> None:
        while True:
            peer, frame = await self._socket.recv_multipart()
            command = decode_command.decode(frame)
            if isinstance(command, Hello):
                self._send(peer, Welcome(self._epoch, self.info))
                continue
            if isinstance(command, Inspect):
                stages = [StageStats("codec", {1: 3, 4: 2}, 0.5)]
                costs = [StageCost("talker", 2, 1, 0.004)]
                self._send(peer, Stats(self._epoch, 16, len(self._by_number), 0, stages, costs, [0.0, 1.0], [1, 4, 2], 3.5))
                continue
            if command.epoch != self._epoch:
                self._send(peer, Failed(command.epoch, command.utterance, "engine_unavailable", "another engine's epoch", True))
                continue
            if isinstance(command, Open):
                making = Making(command.request, command.text, command.finished)
                self.utterances.append(making)
                if self.refusal is not None:
                    no = self.refusal
                    self._send(peer, Failed(self._epoch, command.utterance, no.code, str(no), no.retryable, no.retry_after_s))
                    continue
                self._by_number[peer, command.utterance] = making
                self._start(self._speak(peer, command.utterance, making))
                continue
            making = self._by_number.get((peer, command.utterance))
            if making is None:
                continue
            match command:
                case Append(text=text):
                    making.text += text
                case Finish():
                    making.finished = True
                case Cancel():
                    making.cancelled = True
                case Playback():
                    making.playbacks.append(command)
                    making.heard = command.heard
                case Credit():
                    making.consumed = command.consumed
            making.changed.set()

    async def _speak(self, peer: bytes, number: int, making: Making) -> None:
        def failed() -> None:
            del self._by_number[peer, number]
            self._send(peer, Failed(self._epoch, number, "utterance_failed", "it was told to fail", True))

        def done(reason: str, until: int) -> None:
            del self._by_number[peer, number]
            self._send(peer, Done(self._epoch, number, reason, making.made, until))

        started = False
        while True:
            making.changed.clear()
            if making.cancelled:
                return done("cancelled", len(making.text))
            if "{fail}" in making.text:
                return failed()
            if self.fail_after is not None and making.made >= self.fail_after * SAMPLES_PER_CHAR:
                self.fail_after = None
                return failed()
            wanted = len(making.text) * SAMPLES_PER_CHAR
            if self.cut_after is not None and making.made >= self.cut_after * SAMPLES_PER_CHAR > 0:
                until, self.cut_after = self.cut_after, None
                return done(self.cut_reason, until)
            if making.made >= wanted:
                if making.finished:
                    return done("end", len(making.text))
                until = len(making.text)
                try:
                    async with asyncio.timeout(self.idle_s if making.text else None):
                        while len(making.text) == until and not making.finished and not making.cancelled:
                            making.changed.clear()
                            await making.changed.wait()
                except TimeoutError:
                    return done("idle", until)
            elif making.made - making.consumed >= self.credit_s * RATE:
                await making.changed.wait()
            elif making.request.pace == "live" and making.made - self._heard(making) >= AHEAD_S * RATE:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await making.changed.wait()
            else:
                if not started:
                    started, making.begun_s = True, time.monotonic()
                    self._send(peer, Started(self._epoch, number))
                await asyncio.sleep(self.frame_s)
                frames = 1 if making.made < 3 * FRAME else self.chunk_frames
                pcm = self.sound(making.text, making.made, min(frames * FRAME, wanted - making.made)).tobytes()
                self._send(peer, AudioChunk(self._epoch, number, making.made, len(making.text), pcm))
                making.made += len(pcm) // 2
                making.pcm += pcm

    def sound(self, text: str, first: int, count: int) -> NDArray[np.int16]:
        """So many samples of this text's sound, from `first` on."""
        return speech().take(np.arange(first, first + count), mode="wrap")

    def _heard(self, making: Making) -> int:
        """As reported; without reports, what has been played since the first frame."""
        return making.heard if making.playbacks or not making.made else round((time.monotonic() - making.begun_s) * RATE)


async def _main(endpoint: str, chunk_frames: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with StandInEngine(endpoint, chunk_frames=chunk_frames):
        await stop.wait()


if __name__ == "__main__":
    # Takes the arguments of `python -m engine serve`.
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--model")
    parser.add_argument("--chunk-frames", type=int, default=1)
    arguments = parser.parse_args()
    asyncio.run(_main(arguments.endpoint, arguments.chunk_frames))
