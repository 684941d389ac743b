"""The two clients of the gateway's tests: one writes, one listens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from aiohttp import ClientWebSocketResponse, WSMsgType, web
from aiohttp.test_utils import TestClient
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from numpy.typing import NDArray

from gateway.media.track import COMFORT, SILENCE

PATIENCE_S = 30.0
"""For what comes at once, or with speech of ten seconds; a machine may stand still meanwhile."""


async def until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait for it."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is watched has no event
            await asyncio.sleep(0.005)


class Speaker:
    """A session's WebSocket: sends events, keeps what comes back in order."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.socket = socket
        self.created: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.pcm = bytearray()
        self.frames = 0
        """Binary ones."""

    @classmethod
    async def connect(cls, client: TestClient[web.Request, web.Application]) -> Speaker:
        speaker = cls(await client.ws_connect("/v1/speech"))
        speaker.created = await speaker.event("session.created")
        return speaker

    async def send(self, kind: str, **fields: object) -> None:
        await self.socket.send_json({"type": kind, **fields})

    async def event(self, kind: str) -> dict[str, Any]:
        """The next event of this kind; those before it are kept in `events`, binary frames in `pcm`."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.socket.receive()
                if message.type is WSMsgType.BINARY:
                    self.pcm += message.data
                    self.frames += 1
                    continue
                assert message.type is WSMsgType.TEXT, (message, self.events)
                event: dict[str, Any] = message.json()
                self.events.append(event)
                if event["type"] == kind:
                    return event
                assert event["type"] != "error" or kind == "error", event

    async def say(self, text: str) -> dict[str, Any]:
        """One whole utterance; returns its utterance.done."""
        await self.send("text.append", text=text)
        await self.send("text.end")
        return await self.event("utterance.done")

    async def close(self) -> None:
        await self.socket.close()


class Listener:
    """An aiortc WHEP client that keeps what it decodes, 48 kHz mono, and when each packet came with which RTP time.

    aiortc's jitter buffer hands out a packet when four later ones are there: the last 80 ms come out with the next utterance."""

    def __init__(self, client: TestClient[web.Request, web.Application], configuration: RTCConfiguration | None = None) -> None:
        self.client = client
        self.connection = RTCPeerConnection(configuration or RTCConfiguration(iceServers=[]))
        self.arrivals: list[tuple[float, int]] = []
        """Packets of speech; those of the silence between are in `silences`."""
        self.silences: list[tuple[float, int]] = []
        self.location = ""
        self.answer = ""
        self.headers: Mapping[str, str] = {}
        self.closed = asyncio.Event()
        self.channel: RTCDataChannel | None = None
        self.events: list[dict[str, Any]] = []
        """What came over the data channel."""
        self.playhead = 0
        """How many of the packets that came have been played, as the reports say."""
        self.reported_s = 0.0
        """When it said so last."""
        self._packets: list[int] = []
        self._reporting: asyncio.Task[None] | None = None
        self._samples: list[NDArray[np.int16]] = []
        self._connected = asyncio.Event()
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.connection.add_listener("track", self._on_track)
        self.connection.add_listener("connectionstatechange", self._on_state)

    async def offer(self, *, channel: bool = False) -> str:
        self.connection.addTransceiver("audio", direction="recvonly")
        if channel:
            self.channel = self.connection.createDataChannel("events")
            self.channel.add_listener("open", self._opened.set)
            self.channel.add_listener("message", lambda message: self.events.append(json.loads(message)))
        await self.connection.setLocalDescription(await self.connection.createOffer())
        return str(self.connection.localDescription.sdp)

    async def connect(self, token: str, *, channel: bool = False, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/sdp", **headers}
        async with self.client.post("/v1/whep", data=await self.offer(channel=channel), headers=headers) as response:
            self.answer = await response.text()
            assert response.status == 201, self.answer
            self.location, self.headers = response.headers["Location"], response.headers
        await self.connection.setRemoteDescription(RTCSessionDescription(self.answer, "answer"))
        async with asyncio.timeout(PATIENCE_S):
            await self._connected.wait()
            if self.channel is not None:
                await self._opened.wait()

    def send(self, kind: str, **fields: object) -> None:
        """An event on the data channel."""
        assert self.channel is not None
        self.channel.send(json.dumps({"type": kind, **fields}))

    def report(self, **fields: object) -> None:
        """What a browser says of its playback; `fields` replace some of it."""
        at = min(self.playhead, len(self._packets)) - 1
        self.reported_s = time.monotonic()
        self.send("stats", **{"rtp_time": self._packets[at] if at >= 0 else None, "received": len(self._packets), **fields})

    def play(self, *, behind: int = 4) -> None:
        """From now on: play each packet when `behind` later ones are there, and report it."""
        self.stop_playing()
        self._reporting = asyncio.create_task(self._play(behind))

    def freeze(self) -> None:
        """From now on: play nothing, and report it."""
        self.stop_playing()
        self._reporting = asyncio.create_task(self._play(None))

    def pause(self) -> None:
        """From now on: play to nobody, and say so."""
        self.stop_playing()
        self._reporting = asyncio.create_task(self._play(4, paused=True))

    def stop_playing(self) -> None:
        """No more reports."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None

    async def _play(self, behind: int | None, *, paused: bool = False) -> None:
        frozen_s = time.monotonic()
        while True:
            if behind is not None:
                self.playhead = max(self.playhead, len(self._packets) - behind)
            self.report(age_ms=0 if behind is not None else (time.monotonic() - frozen_s) * 1000, paused=paused)
            await asyncio.sleep(0.2)

    async def channel_event(self, kind: str) -> dict[str, Any]:
        """The next event of this kind on the data channel, or one that has come already; those before it are dropped."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while self.events:
                    if (event := self.events.pop(0))["type"] == kind:
                        return event
                await asyncio.sleep(0.005)

    def told(self) -> list[int]:
        """How much it was told to hold, one after the other, in milliseconds; but for what `channel_event` took."""
        return [event["target_ms"] for event in self.events if event["type"] == "hold"]

    @property
    def played_ms(self) -> int:
        """Speech that it has played, as it said last."""
        speech = {rtp for _, rtp in self.arrivals}
        return 20 * sum(rtp in speech for rtp in self._packets[: self.playhead])

    @property
    def unplayed(self) -> int:
        """Packets that it had, or has got since, when it last said what it has played."""
        return len(self._packets) - self.playhead

    @property
    def sounded(self) -> int:
        """Packets from the first with sound to the last, with those between that are as silent as silence."""
        first, last = (self._packets.index(self.arrivals[at][1]) for at in (0, -1))
        return last - first + 1

    @property
    def samples(self) -> NDArray[np.int16]:
        return np.concatenate(self._samples) if self._samples else np.zeros(0, np.int16)

    async def close(self) -> None:
        self.stop_playing()
        await self.connection.close()
        if self._task is not None:
            await self._task

    def _on_track(self, track: Any) -> None:
        self._task = asyncio.create_task(self._listen(track))
        receiver = self.connection.getReceivers()[0]
        handle = receiver._handle_rtp_packet

        async def noted(packet: Any, arrival_time_ms: int) -> None:
            kind = self.silences if packet.payload in (SILENCE, COMFORT) else self.arrivals
            kind.append((time.monotonic(), packet.timestamp))
            self._packets.append(packet.timestamp)
            await handle(packet, arrival_time_ms=arrival_time_ms)

        receiver._handle_rtp_packet = noted

    def _on_state(self) -> None:
        if self.connection.connectionState == "connected":
            self._connected.set()
        elif self.connection.connectionState in ("closed", "failed"):
            self.closed.set()

    async def _listen(self, track: Any) -> None:
        try:
            while True:
                frame = await track.recv()
                self._samples.append(frame.to_ndarray().reshape(-1, len(frame.layout.channels))[:, 0].astype(np.int16))
        except MediaStreamError:
            return
