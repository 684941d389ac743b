"""Listeners that cost next to nothing, and say when each packet came: by the kernel's clock, so that a busy client makes no packet look late.

aiortc sets the connection up; then its socket is read here. On loopback the kernel stamps a datagram while the sender hands it over, so a
stamp is the moment of the server's `sendto`. RTP's header is not encrypted, and nothing else is read of a packet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import aiohttp
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCSessionDescription

SO_TIMESTAMPNS = 35
"""Of Linux; the socket module has no name for it."""
RTP_RATE = 48000
PACKET_S = 0.02
TAG_BYTES = 10
SILENT_BYTES = 16
"""Payloads up to this say nothing: the gateway's silence has three bytes, its speech some eighty."""
PASSED_ON = 25
"""One packet in so many goes to aiortc, whose reports keep the server from taking this listener for gone."""
PATIENCE_S = 20.0
REPORT_EVERY_S = 0.2
TARGET_MS = 80.0
"""What it holds until it is told otherwise."""
SPARSE_S = 0.1
"""Packets that come no closer than this are comfort noise, and are played when they come."""

Answer = Callable[[str], Awaitable[str]]
"""Takes an SDP offer to a server and brings its answer."""


class Arrival(NamedTuple):
    """One RTP packet."""

    at_s: float
    """When the kernel got it, seconds since the epoch."""
    read_s: float
    """How much later it was read here."""
    rtp_time: int
    speech: bool


class StampedListener:
    """One connection to a server's track."""

    def __init__(self, *, reports: bool = False) -> None:
        """`reports`: have a data channel, say five times a second what is played, and hold what it is told to, as a browser does."""
        self.arrivals: list[Arrival] = []
        self.on_speech: Callable[[], None] = lambda: None
        """Called for each packet that is not silence."""
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._socket: socket.socket | None = None
        self._protocol: asyncio.DatagramProtocol | None = None
        self._unwrapped = 0
        self._count = 0
        self._channel = self._connection.createDataChannel("events") if reports else None
        self._last_on_wire = 0
        self._target_ms = TARGET_MS
        self._reporting: asyncio.Task[None] | None = None

    async def connect(self, answer: Answer) -> None:
        """Offer, and return when packets can come."""
        self._connection.addTransceiver("audio", direction="recvonly")
        connected = asyncio.Event()
        self._connection.add_listener("connectionstatechange", lambda: self._connection.connectionState == "connected" and connected.set())
        await self._connection.setLocalDescription(await self._connection.createOffer())
        await self._connection.setRemoteDescription(RTCSessionDescription(await answer(self._connection.localDescription.sdp), "answer"))
        async with asyncio.timeout(PATIENCE_S):
            await connected.wait()
        self._take_socket()
        if self._channel is not None:
            self._reporting = asyncio.create_task(self._report(self._channel))

    async def close(self) -> None:
        """Leave."""
        if self._reporting is not None:
            self._reporting.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
        await self._connection.close()

    def lateness_s(self, from_s: float, to_s: float) -> list[float]:
        """Of each packet that came in this time, against the promptest of them: how much later it came than its RTP time says."""
        behind = [arrival.at_s - arrival.rtp_time / RTP_RATE for arrival in self.arrivals if from_s <= arrival.at_s < to_s]
        least = min(behind, default=0.0)
        return [each - least for each in behind]

    def _heed(self, message: str) -> None:
        event = json.loads(message)
        if event["type"] == "hold":
            self._target_ms = event["target_ms"]

    async def _report(self, channel: RTCDataChannel) -> None:
        channel.add_listener("message", self._heed)
        await asyncio.sleep(random.random() * REPORT_EVERY_S)
        while True:
            if channel.readyState == "open" and len(self.arrivals) > 1:
                before, last = self.arrivals[-2:]
                sparse = last.at_s - before.at_s > SPARSE_S
                waited_ms, age_ms = (0.0, max(time.time() - last.at_s, 0.0) * 1000) if sparse else (self._target_ms, 0.0)
                played = (self._last_on_wire - round(waited_ms / 1000 * RTP_RATE)) % (1 << 32)
                fields = {"rtp_time": played, "age_ms": age_ms, "received": self._count, "concealed_ms": 0, "buffer_ms": waited_ms}
                fields |= {"target_ms": self._target_ms, "network_ms": 20}
                channel.send(json.dumps({"type": "stats", "rtt_ms": 2, "paused": False, **fields}))
            await asyncio.sleep(REPORT_EVERY_S)

    def _take_socket(self) -> None:
        ice = self._connection.getReceivers()[0].transport.transport._connection
        self._protocol = ice._nominated[1].protocol
        descriptor = self._protocol.transport.get_extra_info("socket").fileno()
        loop = asyncio.get_running_loop()
        # What asyncio's transport reads has lost its stamp.
        loop._remove_reader(descriptor)  # type: ignore[attr-defined]
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        assert self._socket is not None and self._protocol is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                data, stamps, _, address = self._socket.recvmsg(2048, 64)
                if not 128 <= data[0] < 192 or 192 <= data[1] <= 223:
                    # ICE, DTLS and RTCP are aiortc's.
                    self._protocol.datagram_received(data, address)
                    continue
                # What came before the option was set has no stamp.
                if stamps:
                    seconds, nanoseconds = struct.unpack("qq", stamps[0][2])
                    self._note(data, seconds + nanoseconds / 1e9)
                self._count += 1
                if self._count % PASSED_ON == 1:
                    self._protocol.datagram_received(data, address)

    def _note(self, data: bytes, at_s: float) -> None:
        rtp_time = self._last_on_wire = int.from_bytes(data[4:8], "big")
        self._unwrapped += (rtp_time - self._unwrapped + (1 << 31)) % (1 << 32) - (1 << 31)
        extension = 4 + 4 * int.from_bytes(data[14:16], "big") if data[0] & 0x10 else 0
        speech = len(data) - 12 - extension - TAG_BYTES > SILENT_BYTES
        self.arrivals.append(Arrival(at_s, time.time() - at_s, self._unwrapped, speech))
        if speech:
            self.on_speech()


async def post_offer(http: aiohttp.ClientSession, url: str, sdp: str, token: str = "") -> str:
    """WHEP: the answer's SDP."""
    headers = {"Content-Type": "application/sdp", "Authorization": f"Bearer {token}", "Vivavoce-Max-Target-Ms": "4000"}
    async with http.post(f"{url}/v1/whep", data=sdp, headers=headers) as response:
        answer = await response.text()
        assert response.status == 201, answer
        return answer
