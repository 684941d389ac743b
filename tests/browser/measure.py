"""From text to the sample that is heard, in Chromium: `python -m tests.browser.measure [--embedded] [--set client_lead_s=0.06]`. Not a test.

The demo page is handed whole sentences, and says when the first audible sample of each was played. Between gateway and engine a wire-tap
notes what is the engine's own: its time from the text to its first chunk, and the silence with which it begins."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from engine.messages import Append, AudioChunk, decode_command, decode_event
from tests.browser.conftest import serving, tabs
from tests.browser.demo import Demo
from tests.gateway.measure import process
from tests.gateway.stand_in import RATE

SENTENCES = {
    False: ("Hello, how are you doing today?", "A word with you, if I may.", "Good day to all of you out there!"),
    True: ("The meeting starts at seven.", "Good morning, and welcome.", "Hello, we are well."),
}
QUIET_S = (1.6, 3.0)
"""From the end of one utterance to the next: as between two turns of a conversation."""
AUDIBLE_RMS = 0.004
AUDIBLE_SAMPLES = 64
"""The page's own measure of a sound (web/tap.js), at the engine's rate."""

SAY = """async (text) => {
  const { session } = vivavoce;
  const heard = new Promise((resolve) => {
    const stop = session.on("heard", ({ utterance }) => {
      stop();
      resolve([session.tap.onsetAt, utterance.gatewayTtfaMs]);
    });
  });
  const done = new Promise((resolve) => {
    const stop = session.on("done", () => {
      stop();
      resolve();
    });
  });
  const look = async () => {
    return await session.stats();
  };
  const earlier = await look();
  await new Promise((resolve) => setTimeout(resolve, 200));
  const before = await look();
  const sentAt = performance.now();
  session.append(text);
  session.end();
  const [onsetAt, gatewayMs] = await heard;
  await done;
  const after = await look();
  const mean = (sum, from, to) => {
    const count = to.jitterBufferEmittedCount - from.jitterBufferEmittedCount;
    return count ? ((to[sum] - from[sum]) / count) * 1000 : 0;
  };
  const [waited, wanted] = ["jitterBufferDelay", "jitterBufferMinimumDelay"];
  return [onsetAt - sentAt, gatewayMs, mean(waited, earlier, before), mean(waited, before, after), mean(wanted, before, after)];
}"""
"""Milliseconds: text handed over to first audible sample, the gateway's ttfa_ms, the receiver's buffer before it and in it."""


@dataclass
class Made:
    """What went by of one utterance."""

    text_s: float = 0.0
    first_s: float = 0.0
    pcm: bytearray = field(default_factory=bytearray)

    @property
    def silence_s(self) -> float:
        """Until its first audible sample."""
        samples = np.frombuffer(self.pcm, "<i2")[: len(self.pcm) // 2 // AUDIBLE_SAMPLES * AUDIBLE_SAMPLES] / 32768
        loud = np.flatnonzero(np.sqrt(np.mean(samples.reshape(-1, AUDIBLE_SAMPLES) ** 2, axis=1)) >= AUDIBLE_RMS)
        return float(loud[0]) * AUDIBLE_SAMPLES / RATE


class WireTap:
    """Stands between one gateway and its engine, in a thread of its own."""

    def __init__(self, front: str, back: str) -> None:
        self.made: list[Made] = []
        self._context = zmq.Context()
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        for socket in (self._front, self._back):
            socket.setsockopt(zmq.LINGER, 0)
        self._front.bind(front)
        self._back.connect(back)
        self._by_number: dict[int, Made] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> WireTap:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._front, self._back):
            poller.register(socket, zmq.POLLIN)
        peer = b""
        while not self._stop.is_set():
            for socket, _ in poller.poll(100):
                now_s = time.monotonic()
                if socket is self._front:
                    peer, frame = self._front.recv_multipart()
                    self._back.send(frame)
                    if isinstance(command := decode_command.decode(frame), Append):
                        self.made.append(self._by_number.setdefault(command.utterance, Made(now_s)))
                else:
                    frame = self._back.recv()
                    self._front.send_multipart((peer, frame))
                    if isinstance(event := decode_event.decode(frame), AudioChunk) and (made := self._by_number.get(event.utterance)):
                        made.first_s = made.first_s or now_s
                        made.pcm += event.pcm


@asynccontextmanager
async def page(arguments: argparse.Namespace) -> AsyncIterator[tuple[Demo, WireTap]]:
    """The page, connected, with all that it needs behind it."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        front, back = f"ipc://{folder}/front", f"ipc://{folder}/back"
        module = ("engine", "serve") if arguments.embedded else ("tests.gateway.stand_in", "--chunk-frames", "8")
        await stack.enter_async_context(process(*module, "--endpoint", back, announces=False))
        wire_tap = stack.enter_context(WireTap(front, back))
        settings = [word for setting in arguments.set for word in ("--set", setting)]
        gateway = stack.enter_context(serving(folder, "--engine", front, *settings, rough=arguments.rough))
        open_demo = await stack.enter_async_context(tabs(folder / "profile"))
        demo = await open_demo(gateway.url)
        await demo.connect()
        yield demo, wire_tap


async def main(arguments: argparse.Namespace) -> None:
    """Say so many sentences, with pauses, and print what came of it."""
    rows: list[tuple[float, ...]] = []
    stalls = 0
    async with page(arguments) as (demo, wire_tap):
        for _ in range(arguments.utterances):
            demo.watch.reset()
            whole_ms, gateway_ms, *buffer_ms = await demo.page.evaluate(SAY, random.choice(SENTENCES[arguments.embedded]))
            stalls += demo.watch.stalled
            made = wire_tap.made[-1]
            engine_ms, silence_ms = (made.first_s - made.text_s) * 1000, made.silence_s * 1000
            rows.append((whole_ms, engine_ms, silence_ms, whole_ms - engine_ms - silence_ms, gateway_ms - engine_ms, *buffer_ms))
            await asyncio.sleep(random.uniform(*arguments.pause))
        inserted = await counters(demo)
    names = (
        "text to first audible sample in the page",
        "of it the engine: text to first chunk",
        "of it the engine: silence that its chunk begins with",
        "beyond the engine",
        "of that in the gateway, to the packet's leaving",
        "the receiver's buffer in the silence before",
        "the receiver's buffer in speech",
        "what the receiver wanted it to be for the network's sake",
    )
    print(f"{'embedded voice' if arguments.embedded else 'stand-in engine'}, n {len(rows)}, {' '.join(arguments.set) or 'default settings'}")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        print(f"  {name}: p50 {np.percentile(values, 50):.1f} p95 {np.percentile(values, 95):.1f} ms")
    print(f"  machine stood still in {stalls} of them; receiver: {inserted}; load {os.getloadavg()[0]:.1f}", flush=True)


async def counters(demo: Demo) -> dict[str, int]:
    """What the receiver did to the sound, in samples."""
    stats: dict[str, Any] = await demo.page.evaluate("vivavoce.session.stats()")
    return {name: stats[name] for name in ("concealedSamples", "insertedSamplesForDeceleration", "removedSamplesForAcceleration")}


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--utterances", type=int, default=40)
    parser.add_argument("--pause", type=float, nargs=2, default=QUIET_S, metavar="SECONDS", help="between utterances: the least and the most")
    parser.add_argument("--embedded", action="store_true", help="the real engine with the embedded voice")
    parser.add_argument("--rough", default="", metavar="JITTER_MS,LOSS[,STALL_S[,DELAY_S]]", help="a network between, see tests.browser.rough")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the gateway")
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(parsed()))
