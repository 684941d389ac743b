"""Ear: a WebRTC listener of a session for `vivavoce bench --mode webrtc`. It decodes each packet as it comes, without a jitter buffer's delay."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import av
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.rtcrtpreceiver import StreamStatistics
from aiortc.rtp import RtpPacket

from gateway.bench.listener import Listener
from gateway.media.track import SILENCE

RATE = 48_000
CONNECT_S = 10.0


class Ear:
    """Connected once for a session. What comes goes to `listener`, if there is one, from the first packet that is not silence."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._decoder = av.CodecContext.create("opus", "r")
        self._silence: list[tuple[float, bytes]] = []
        self._received: dict[int, StreamStatistics] = {}
        """By source: what aiortc makes its receiver reports of."""

    @property
    def connected(self) -> bool:
        return self._connection.connectionState == "connected"

    async def connect(self, http: aiohttp.ClientSession, whep: str, token: str) -> None:
        """Raises aiohttp.ClientError if the server or the network will not."""
        connection = self._connection
        connected = asyncio.Event()

        def changed() -> None:
            if connection.connectionState == "connected":
                connected.set()

        connection.add_listener("connectionstatechange", changed)
        connection.addTransceiver("audio", direction="recvonly")
        await connection.setLocalDescription(await connection.createOffer())
        headers = {"Content-Type": "application/sdp", "Authorization": f"Bearer {token}"}
        async with http.post(whep, data=connection.localDescription.sdp, headers=headers) as response:
            answer = await response.text()
            if response.status != 201:
                raise aiohttp.ClientError(f"WHEP: {response.status}: {answer[:200]}")
        # aiortc's own way leads through a jitter buffer that hands a packet out when four later ones are there.
        receiver = connection.getReceivers()[0]
        receiver._handle_rtp_packet = self._packet  # type: ignore[method-assign]
        self._received = receiver._RTCRtpReceiver__remote_streams  # type: ignore[attr-defined]
        await connection.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        try:
            async with asyncio.timeout(CONNECT_S):
                await connected.wait()
        except TimeoutError:
            raise aiohttp.ClientError(f"WebRTC: not connected within {CONNECT_S:g} s; does UDP get through?") from None

    async def close(self) -> None:
        await self._connection.close()

    async def _packet(self, packet: RtpPacket, arrival_time_ms: int) -> None:
        at_s = time.monotonic()
        # Who reports nothing is taken for gone.
        self._received.setdefault(packet.ssrc, StreamStatistics(RATE)).add(packet)
        pcm = self._decoded(packet.payload)
        listener = self.listener
        if listener is None:
            self._silence.clear()
        elif packet.payload != SILENCE:
            if self._silence and listener.first_s is not None:
                # The stream ran on in silence, and speech came after all: just that the listener heard as a gap.
                listener.underruns += 1
                for silent_at_s, silent in self._silence:
                    listener.hear(silent, silent_at_s)
                    listener.gap_s += len(silent) / 2 / RATE
            self._silence.clear()
            listener.hear(pcm, at_s)
        elif listener.first_s is not None:
            self._silence.append((at_s, pcm))

    def _decoded(self, payload: bytes) -> bytes:
        """s16le, mono, at RATE."""
        frames = self._decoder.decode(av.Packet(payload))
        # Floating point, a row a channel; all channels are the same here.
        return b"".join((frame.to_ndarray()[0].clip(-1.0, 1.0) * 32767.0).astype(np.int16).tobytes() for frame in frames)
