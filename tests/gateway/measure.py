"""What the gateway costs: `python -m tests.gateway.measure [--calls 10] [--embedded]`. Not a test.

Gateway and engine run in processes of their own; the listeners here count packets and do not decode them. The engine is the
stand-in, or with --embedded the real one with one thread and the embedded voice."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence

import aiohttp
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.rtp import RtpPacket

from gateway.media.track import SILENCE

FIRST = {False: "Hello.", True: "The meeting starts at seven."}
TEXT = "The quick brown fox jumps over the lazy dog while seven wizards argue about the weather, and she sells sea shells on the sea shore."


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Call:
    """A session and its listener."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []

    async def connect(self, http: aiohttp.ClientSession, url: str) -> None:
        self.socket = await http.ws_connect(f"{url}/v1/speech")
        token = (await self.socket.receive_json())["token"]
        await self.socket.send_json({"type": "session.update", "audio": {"format": "webrtc"}})
        await self.socket.receive_json()
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.connection.addTransceiver("audio", direction="recvonly")
        connected = asyncio.Event()
        self.connection.add_listener("connectionstatechange", lambda: self.connection.connectionState == "connected" and connected.set())
        await self.connection.setLocalDescription(await self.connection.createOffer())
        headers = {"Content-Type": "application/sdp", "Authorization": f"Bearer {token}"}
        async with http.post(f"{url}/v1/whep", data=self.connection.localDescription.sdp, headers=headers) as response:
            answer = await response.text()
            assert response.status == 201, answer

        async def count(packet: RtpPacket, arrival_time_ms: int) -> None:
            # Between utterances the stream runs on in silence.
            if self.arrivals or len(packet.payload) > len(SILENCE):
                self.arrivals.append(time.monotonic())

        self.connection.getReceivers()[0]._handle_rtp_packet = count
        await self.connection.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        await connected.wait()

    async def say(self, text: str) -> tuple[float, float, float]:
        """Seconds spoken, text to first packet of sound here, and the gateway's own ttfa."""
        self.arrivals.clear()
        begun_s = time.monotonic()
        await self.socket.send_json({"type": "text.append", "text": text})
        await self.socket.send_json({"type": "text.end"})
        ttfa_s = 0.0
        while True:
            event = await self.socket.receive_json()
            if event["type"] == "utterance.started":
                ttfa_s = event["ttfa_ms"] / 1000
            if event["type"] == "utterance.done":
                return event["duration_ms"] / 1000, self.arrivals[0] - begun_s, ttfa_s

    def lateness_s(self) -> list[float]:
        """Of each packet after the first three, against the schedule that the first began."""
        return [at - self.arrivals[0] - 0.02 * (i - 2) for i, at in enumerate(self.arrivals) if i > 2]

    async def close(self) -> None:
        await self.socket.close()
        await self.connection.close()


async def measure(url: str, pid: int, engine_pid: int, counts: Sequence[int], first: str) -> None:
    async with aiohttp.ClientSession() as http:
        one = Call()
        await one.connect(http, url)
        firsts, ttfas = [], []
        for _ in range(60):
            _, first_s, ttfa_s = await one.say(first)
            firsts.append(first_s * 1000)
            ttfas.append(ttfa_s * 1000)
            await asyncio.sleep(0.05)
        await one.close()
        for name, values in (("text sent to first packet here", firsts), ("ttfa_ms as the gateway says", ttfas)):
            print(f"{name}: p50 {np.percentile(values, 50):.1f} ms, p95 {np.percentile(values, 95):.1f} ms, n {len(values)}")
        for count in counts:
            calls = [Call() for _ in range(count)]
            before_s = cpu_s(pid)
            for call in calls:
                await call.connect(http, url)
            await asyncio.sleep(0.5)
            setup_s = cpu_s(pid) - before_s
            before_s = cpu_s(pid)
            await asyncio.sleep(2.0)
            idle_s = (cpu_s(pid) - before_s) / 2.0
            before_s, engine_before_s = cpu_s(pid), cpu_s(engine_pid)
            spoken_s = sum(duration_s for duration_s, _, _ in await asyncio.gather(*(call.say(TEXT) for call in calls)))
            used_s, engine_s = cpu_s(pid) - before_s, cpu_s(engine_pid) - engine_before_s
            late = np.array([late_s for call in calls for late_s in call.lateness_s()]) * 1000
            print(
                f"{count} calls: {used_s / spoken_s * 1000:.1f} ms CPU per call-second ({spoken_s:.0f} call-seconds), "
                f"set-up {setup_s / count * 1000:.0f} ms a call, idle {idle_s / count * 1000:.1f} ms a call-second, "
                f"packet lateness p50 {np.percentile(late, 50):.1f} p99 {np.percentile(late, 99):.1f} max {late.max():.1f} ms, "
                f"real-time factor of the engine {engine_s / spoken_s:.3f}"
            )
            await asyncio.gather(*(call.close() for call in calls))


async def main(counts: Sequence[int], port: int, embedded: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/engine"
        command = ("-m", "engine", "serve", "--threads", "1") if embedded else ("-m", "tests.gateway.stand_in")
        engine = await asyncio.create_subprocess_exec(sys.executable, *command, "--endpoint", endpoint)
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "serve", "--engine", endpoint, "--port", str(port), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert gateway.stdout is not None
            print((await gateway.stdout.readline()).decode().strip())
            await measure(f"http://127.0.0.1:{port}", gateway.pid, engine.pid, counts, FIRST[embedded])
        finally:
            gateway.terminate()
            engine.terminate()
            await gateway.wait()
            await engine.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--port", type=int, default=18809)
    parser.add_argument("--embedded", action="store_true", help="the real engine with the embedded voice")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.calls, arguments.port, arguments.embedded))
