"""An engine for measuring what is around it: sound at the pace of speech, in one thread that does nothing else, at any number of streams.

It takes the arguments of `python -m engine serve`. Told to stop, it writes to `--report` what it did, as JSON: its CPU time, its messages,
and for each utterance when its first command came and its first sound left (seconds of the machine's monotonic clock)."""

from __future__ import annotations

import argparse
import heapq
import json
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from engine.messages import (
    Append,
    AudioChunk,
    Cancel,
    Done,
    EngineInfo,
    Event,
    Finish,
    Hello,
    Inspect,
    Open,
    Started,
    Stats,
    Welcome,
    decode_command,
    encode,
)

RATE, FRAME = 24_000, 1920
FRAMES_PER_CHAR = 0.9
HURRY = 1.02
"""So much faster than speech, that a listener who plays at once does not run dry for the timer's sake."""


@dataclass
class Stream:
    """One utterance. Samples count up; `due_s` is when its next chunk is."""

    came_s: float
    due_s: float = 0.0
    chars: int = 0
    finished: bool = False
    gone: bool = False
    made: int = 0
    sounded_s: float = 0.0


class PacedEngine:
    """Serves `endpoint`: `first` frames `first_s` after an utterance has text, then `frames` at a time, at the pace of speech."""

    info = EngineInfo("paced", "paced", ["Vivian", "Ryan"], ["english", "german"], RATE, FRAME, 5000, "none")

    def __init__(self, endpoint: str, first_s: float, first: int, frames: int) -> None:
        self._first_s, self._first, self._frames = first_s, first, frames
        self._epoch = random.getrandbits(31) + 1
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.bind(endpoint)
        self._open: dict[tuple[bytes, int], Stream] = {}
        self._ended: list[Stream] = []
        self._due: list[tuple[float, tuple[bytes, int]]] = []
        self._noise = np.random.default_rng(1).normal(0, 3000, RATE * 10).astype(np.int16).tobytes()
        self._stop = False
        self.sent = self.received = 0
        self.late_s: list[float] = []

    def stop(self, *signal: object) -> None:
        self._stop = True

    def run(self) -> None:
        while not self._stop:
            wait_s = self._due[0][0] - time.monotonic() if self._due else 1.0
            if wait_s > 0:
                self._socket.poll(1 + int(min(1.0, wait_s) * 1000))
            while True:
                try:
                    peer, body = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self.received += 1
                self._obey(peer, body, time.monotonic())
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                due_s, key = heapq.heappop(self._due)
                if (stream := self._open.get(key)) is not None and stream.due_s == due_s:
                    self.late_s.append(now_s - due_s)
                    self._chunk(key, stream)
        self._socket.close(linger=0)
        self._context.term()

    def report(self) -> dict[str, object]:
        times = os_times()
        late = sorted(self.late_s) or [0.0]
        lags = {"p50": late[len(late) // 2] * 1000, "p99": late[len(late) * 99 // 100] * 1000}
        stamps = [(stream.came_s, stream.sounded_s) for stream in self._ended]
        return {"cpu_s": times, "sent": self.sent, "received": self.received, "late_ms": lags, "utterances": stamps}

    def _send(self, peer: bytes, event: Event) -> None:
        self.sent += 1
        self._socket.send_multipart((peer, encode(event)), zmq.NOBLOCK)

    def _obey(self, peer: bytes, body: bytes, now_s: float) -> None:
        command = decode_command.decode(body)
        if isinstance(command, Hello):
            return self._send(peer, Welcome(self._epoch, self.info))
        if isinstance(command, Inspect):
            return self._send(peer, Stats(self._epoch, 1024, len(self._open), 0, [], [], [0.0], [0, 0], 0.0))
        key = peer, command.utterance
        if isinstance(command, Open):
            stream = self._open[key] = Stream(now_s, chars=len(command.text), finished=command.finished)
            if command.text:
                self._plan(key, stream, now_s + self._first_s)
            return None
        stream = self._open.get(key)
        match command:
            case _ if stream is None:
                pass
            case Append(text=text):
                stream.chars += len(text)
                if not stream.due_s:
                    self._plan(key, stream, now_s + self._first_s)
            case Finish():
                stream.finished = True
            case Cancel():
                self._end(key, stream, "cancelled")
        return None

    def _plan(self, key: tuple[bytes, int], stream: Stream, due_s: float) -> None:
        stream.due_s = due_s
        heapq.heappush(self._due, (due_s, key))

    def _chunk(self, key: tuple[bytes, int], stream: Stream) -> None:
        peer, number = key
        whole = max(1, round(FRAMES_PER_CHAR * stream.chars)) * FRAME
        if stream.made >= whole:
            if stream.finished:
                return self._end(key, stream, "end")
            return self._plan(key, stream, stream.due_s + 0.01)
        if not stream.made:
            self._send(peer, Started(self._epoch, number))
        samples = min((self._frames if stream.made else self._first) * FRAME, whole - stream.made)
        begin = 2 * stream.made % (len(self._noise) // 2)
        self._send(peer, AudioChunk(self._epoch, number, stream.made, stream.chars, self._noise[begin : begin + 2 * samples]))
        stream.sounded_s = stream.sounded_s or time.monotonic()
        stream.made += samples
        if stream.made >= whole and stream.finished:
            return self._end(key, stream, "end")
        return self._plan(key, stream, stream.due_s + samples / RATE / HURRY)

    def _end(self, key: tuple[bytes, int], stream: Stream, reason: str) -> None:
        peer, number = key
        del self._open[key]
        self._ended.append(stream)
        self._send(peer, Done(self._epoch, number, reason, stream.made, stream.chars))


def os_times() -> dict[str, float]:
    """CPU seconds of the thread that does the work, and of the whole process with ZeroMQ's own threads."""
    return {"thread": time.thread_time(), "process": time.process_time()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--model")
    parser.add_argument("--log-format")
    parser.add_argument("--first-s", type=float, default=0.006, help="until an utterance sounds")
    parser.add_argument("--first", type=int, default=2, help="frames of its first chunk")
    parser.add_argument("--frames", type=int, default=1, help="frames of the others")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    engine = PacedEngine(arguments.endpoint, arguments.first_s, arguments.first, arguments.frames)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, engine.stop)
    engine.run()
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(engine.report()))


if __name__ == "__main__":
    main()
