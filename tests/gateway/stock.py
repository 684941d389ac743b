"""What aiortc does by itself: `python -m tests.gateway.stock` answers WHEP offers with speech as AudioFrames, which aiortc encodes.

A track paced as aiortc's own AudioStreamTrack is, on the event loop that the gateway runs on. Its samples lie ready, so it has less to do
than the gateway, which gets them from an engine."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from fractions import Fraction

import numpy as np
import uvloop
from aiohttp import web
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from av import AudioFrame
from scipy.signal import resample_poly

from tests.gateway.stand_in import RATE, speech

PACKETS_A_SECOND = 50


class SpeechTrack(MediaStreamTrack):
    """Speech without an end, in frames of 20 ms."""

    kind = "audio"

    def __init__(self, rate: int) -> None:
        super().__init__()
        self._rate = rate
        self._samples = speech() if rate == RATE else np.clip(resample_poly(speech().astype(float), rate // RATE, 1), -32768, 32767).astype("<i2")
        self._from = random.randrange(len(self._samples))
        self._made = 0
        self._began_s = 0.0

    async def recv(self) -> AudioFrame:
        """The next frame, when it is due."""
        count = self._rate // PACKETS_A_SECOND
        if self._made:
            await asyncio.sleep(self._began_s + self._made / self._rate - time.time())
        else:
            self._began_s = time.time()
        start = (self._from + self._made) % (len(self._samples) - count)
        frame = AudioFrame.from_ndarray(self._samples[start : start + count].reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = self._rate, self._made, Fraction(1, self._rate)
        self._made += count
        return frame


async def serve(port: int, rate: int) -> None:
    """Until SIGTERM."""
    connections: list[RTCPeerConnection] = []

    async def whep(request: web.Request) -> web.Response:
        connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        connections.append(connection)
        connection.addTrack(SpeechTrack(rate))
        await connection.setRemoteDescription(RTCSessionDescription(await request.text(), "offer"))
        await connection.setLocalDescription(await connection.createAnswer())
        return web.Response(status=201, text=connection.localDescription.sdp, content_type="application/sdp")

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    app = web.Application()
    app.add_routes([web.post("/v1/whep", whep)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"stock aiortc is listening on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await stop.wait()
    await asyncio.gather(*(connection.close() for connection in connections))
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=int, default=RATE, help="of the frames; 48000 spares aiortc its resampling")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.rate))
