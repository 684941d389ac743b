"""Source: where a WebRTC line's packets come from. EncodedQueue has utterances one after another; Mixer (gateway.media.mixer) at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import Protocol

from gateway.media.opus import LOOKAHEAD_SAMPLES, PACKET_BYTES, PACKET_S, PACKET_SAMPLES, RATE, OpusEncoder
from gateway.media.playhead import Packet, Share

FIRST_HOP_PACKETS = 2
"""What the next chunk of an engine that speaks some times faster than it is heard can join in time."""
HOP_PACKETS = 10
QUEUE_S = 5.0
"""Writers wait while this much is there and unsent; the engine's credit then stops it."""


class Source(Protocol):
    """Packets in the making. One task at a time writes an utterance."""

    @property
    def ready(self) -> bool:
        """Whether `prepare` leaves a packet to be taken."""

    @property
    def queued_s(self) -> float:
        """Speech that was written and not taken yet."""

    @property
    def speaking(self) -> bool:
        """In mid-utterance: some of it has been encoded, and more is to come from the engine."""

    def begin(self, utterance: int, after: int | None) -> None:
        """`utterance` is going to be written, and is to sound behind the end of `after`."""

    async def write(self, utterance: int, pcm: bytes) -> None:
        """More s16le audio of `utterance`; waits while there is much of it."""

    async def end(self, utterance: int) -> None:
        """`utterance` is complete."""

    async def prepare(self) -> None:
        """Encode the next packet, if that has not been done. Only while `ready`."""

    def take(self) -> Packet | None:
        """The next packet, None if none is encoded."""

    def over(self) -> list[int]:
        """Utterances of which everything has been taken; each is named once."""

    def put_back(self, packets: list[Packet]) -> None:
        """These were taken and are to be sent again, before all others."""

    def drop(self, doomed: Collection[int]) -> None:
        """Nothing more of these utterances may be taken. They are not written any more."""


def padded(pcm: bytearray) -> bytearray:
    """An utterance's last samples with silence enough to push them through the decoder, up to a whole packet."""
    pcm = pcm + bytes(2 * LOOKAHEAD_SAMPLES)
    return pcm + bytes(-len(pcm) % PACKET_BYTES)


class EncodedQueue:
    """Encodes as audio arrives, ahead of time and several packets at once. `arrived` is called when there is a packet more."""

    def __init__(self, encoders: Executor, arrived: Callable[[], None]) -> None:
        self._encoders = encoders
        self._arrived = arrived
        self._encoder: OpusEncoder | None = None
        self._writing = 0
        self._begun = self._unfinished = False
        self._pcm = bytearray()
        self._packets: deque[Packet] = deque()
        self._queued = 0
        """Samples of speech in `_packets`."""
        self._ends: deque[int] = deque()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def ready(self) -> bool:
        """See Source."""
        return bool(self._packets)

    @property
    def queued_s(self) -> float:
        """See Source."""
        return self._queued / RATE

    @property
    def speaking(self) -> bool:
        """See Source."""
        return self._begun and self._unfinished

    def begin(self, utterance: int, after: int | None) -> None:
        """See Source: all follow each other."""

    async def write(self, utterance: int, pcm: bytes) -> None:
        """See Source."""
        if utterance != self._writing:
            self._writing, self._begun, self._unfinished = utterance, False, True
        self._pcm += pcm
        while True:
            # Some packets first, and nothing before they are whole; then whatever is there.
            least, most = (1, HOP_PACKETS) if self._begun else (FIRST_HOP_PACKETS, FIRST_HOP_PACKETS)
            count = min(len(self._pcm) // PACKET_BYTES, most)
            if count < least:
                return
            await self._encode(count, count * PACKET_SAMPLES)
            await self._room.wait()

    async def end(self, utterance: int) -> None:
        """See Source."""
        if utterance == self._writing:
            speech = len(self._pcm) // 2
            self._pcm = padded(self._pcm)
            while self._pcm:
                count = min(len(self._pcm) // PACKET_BYTES, HOP_PACKETS)
                await self._encode(count, min(speech, count * PACKET_SAMPLES))
                speech = max(speech - count * PACKET_SAMPLES, 0)
            self._unfinished = False
        self._ends.append(utterance)

    async def prepare(self) -> None:
        """See Source: it was encoded when it came."""

    def take(self) -> Packet | None:
        """See Source."""
        if not self._packets:
            return None
        packet = self._packets.popleft()
        self._queued -= packet.samples
        self._make_room()
        return packet

    def over(self) -> list[int]:
        """See Source."""
        over = []
        while self._ends and (not self._packets or self._packets[0].shares[0].utterance > self._ends[0]):
            over.append(self._ends.popleft())
        return over

    def put_back(self, packets: list[Packet]) -> None:
        """See Source."""
        self._packets.extendleft(reversed(packets))
        self._count()
        self._make_room()

    def drop(self, doomed: Collection[int]) -> None:
        """See Source."""
        if self._writing in doomed:
            # A hop may still run in its thread: it keeps the old encoder, its packets go nowhere.
            self._encoder, self._pcm, self._writing, self._unfinished = None, bytearray(), 0, False
        self._packets = deque(packet for packet in self._packets if packet.shares[0].utterance not in doomed)
        self._count()
        self._ends = deque(number for number in self._ends if number not in doomed)
        self._make_room()

    async def _encode(self, count: int, samples: int) -> None:
        if self._encoder is None:
            self._encoder = OpusEncoder()
        pcm = bytes(self._pcm[: count * PACKET_BYTES])
        del self._pcm[: count * PACKET_BYTES]
        payloads = await asyncio.get_running_loop().run_in_executor(self._encoders, self._encoder.encode, pcm)
        for payload in payloads:
            speech = min(samples, PACKET_SAMPLES)
            samples -= speech
            self._queued += speech
            self._packets.append(Packet(payload, (Share(self._writing, speech, not self._begun),)))
            self._begun = True
        self._arrived()
        self._make_room()

    def _count(self) -> None:
        self._queued = sum(packet.samples for packet in self._packets)

    def _make_room(self) -> None:
        if len(self._packets) * PACKET_S < QUEUE_S:
            self._room.set()
        else:
            self._room.clear()
