"""A session's way out for audio: OpusLine feeds the WebRTC listener, PcmLine (gateway.media.pcm) the session's own WebSocket.

Utterances are written one after another, in order of their numbers; the session is told when the first sample of one has left
and when all of it has."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import Executor
from typing import Protocol

from gateway.media.opus import LOOKAHEAD_SAMPLES, PACKET_BYTES, PACKET_S, PACKET_SAMPLES, RATE, OpusEncoder
from gateway.media.pacer import BURST_PACKETS, Slot
from gateway.media.playhead import Packet, Pause, Playhead

FIRST_HOP_PACKETS = BURST_PACKETS
HOP_PACKETS = 10
QUEUE_S = 5.0
"""Writers wait while this much is encoded and unsent; the engine's credit then stops it."""


class LineEvents(Protocol):
    """What a line tells its session."""

    def audio_started(self, utterance: int, now_s: float, rtp_time: int | None) -> None:
        """The first sample is leaving now, with this RTP timestamp. Said again where a new listener gets it again."""

    def audio_sent(self, utterance: int, now_s: float) -> None:
        """All of it has left."""

    def listener_came(self) -> None:
        """There is somebody to hear what is written from now on."""


class Heard(Protocol):
    """What the listener of a line has heard: samples by utterance, times in monotonic seconds."""

    def measured(self, now_s: float) -> bool:
        """Whether the listener itself has said where it is, not long ago."""

    def heard(self, utterance: int, now_s: float) -> int:
        """Samples of `utterance` heard by now."""

    def playing(self, utterance: int, now_s: float) -> bool:
        """Whether sound of `utterance` is running now."""

    def dry(self, now_s: float) -> bool:
        """Whether all speech that was sent has been played."""

    def buffered_s(self, now_s: float) -> float:
        """Speech that was sent and not heard yet."""

    def forget(self, utterance: int) -> None:
        """No more questions about `utterance` will come."""


class Line(Protocol):
    """What a session needs of a line."""

    @property
    def playout(self) -> Heard:
        """What was heard of what was written."""

    @property
    def queued_s(self) -> float:
        """Speech that was written and not sent yet."""

    async def write(self, utterance: int, pcm: bytes) -> None:
        """More s16le audio of `utterance`; waits while the line is full."""

    async def end(self, utterance: int) -> None:
        """`utterance` is complete."""

    def drop(self, first: int, now_s: float) -> None:
        """Nothing more of utterance `first` and later ones may leave. The caller has stopped writing them."""


class OpusLine:
    """Encodes as audio arrives and keeps packets until the attached listener's track takes them at their time.

    Between utterances the stream runs on in silence for `awake_s`. A receiver that is fed after a pause believes its buffer
    empty for most of a second, however much is sent at once, and stretches speech to fill it; one that was never starved plays
    every sample as it came. With no listener attached, or while it is paused, audio waits. A new listener replaces the old one and goes on
    where that one stopped: what was sent to the old one and not heard is sent again."""

    def __init__(self, events: LineEvents, encoders: Executor, awake_s: float) -> None:
        self.playout = Playhead(RATE)
        self.underruns = 0
        """Packets in mid-utterance that were not ready before the listener ran dry: the engine was late."""
        self.stalls = 0
        """Packets that were ready, and sent only after the listener ran dry: this process was late."""
        self._events = events
        self._encoders = encoders
        self._encoder: OpusEncoder | None = None
        self._writing = 0
        self._begun = self._unfinished = False
        self._awake_s = awake_s
        self._awake_until_s = float("-inf")
        self._pcm = bytearray()
        self._packets: deque[Packet] = deque()
        self._ends: deque[int] = deque()
        self._listener: object | None = None
        self._pause: Pause | None = None
        self._unheard_s: float | None = None
        """Since when nobody has been there to hear what is sent; None: somebody is."""
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def rouse(self, now_s: float) -> None:
        """Speech is to be expected: for `awake_s` from now the stream runs on where there is none."""
        self._awake_until_s = now_s + self._awake_s
        self._arrived.set()

    def awake(self, now_s: float) -> bool:
        """Whether silence is to be sent where there is no speech."""
        return now_s < self._awake_until_s

    @property
    def attached(self) -> bool:
        """Whether there is a listener."""
        return self._listener is not None

    @property
    def queued_s(self) -> float:
        """See Line."""
        return sum(packet.samples for packet in self._packets) / RATE

    def unheard_for(self, now_s: float) -> float:
        """Seconds for which nobody has taken any packets: no listener, or one that is not connected yet or is paused."""
        return 0.0 if self._unheard_s is None else now_s - self._unheard_s

    @property
    def speaking(self) -> bool:
        """In mid-utterance: the listener hears it, and more of it is to come from the engine."""
        return self._begun and self._unfinished and self._pause is None

    async def write(self, utterance: int, pcm: bytes) -> None:
        """See Line."""
        if utterance != self._writing:
            self._writing, self._begun, self._unfinished = utterance, False, True
        self._pcm += pcm
        while True:
            # A spurt's burst first, and nothing before it is whole; then whatever is there.
            least, most = (1, HOP_PACKETS) if self._begun else (FIRST_HOP_PACKETS, FIRST_HOP_PACKETS)
            count = min(len(self._pcm) // PACKET_BYTES, most)
            if count < least:
                return
            await self._encode(count, count * PACKET_SAMPLES)
            await self._room.wait()

    async def end(self, utterance: int) -> None:
        """See Line."""
        if utterance == self._writing:
            speech = len(self._pcm) // 2
            # Silence enough to push the last sample through the decoder, up to a whole packet.
            self._pcm += bytes(2 * LOOKAHEAD_SAMPLES)
            self._pcm += bytes(-len(self._pcm) % PACKET_BYTES)
            while self._pcm:
                count = min(len(self._pcm) // PACKET_BYTES, HOP_PACKETS)
                await self._encode(count, min(speech, count * PACKET_SAMPLES))
                speech = max(speech - count * PACKET_SAMPLES, 0)
            self._unfinished = False
        self._ends.append(utterance)
        self._settle()

    def drop(self, first: int, now_s: float) -> None:
        """See Line."""
        if self._writing >= first:
            # A hop may still run in its thread: it keeps the old encoder, its packets go nowhere.
            self._encoder, self._pcm, self._writing, self._unfinished = None, bytearray(), 0, False
        while self._packets and self._packets[-1].utterance >= first:
            self._packets.pop()
        self._ends = deque(number for number in self._ends if number < first)
        self._make_room()
        self.playout.drop(first, now_s)

    def attach(self, listener: object) -> None:
        """From now on `listener` takes the packets, and nobody else."""
        now_s = time.monotonic()
        self._packets.extendleft(reversed(self.playout.begin(now_s)))
        self._make_room()
        self._listener, self._pause, self._unheard_s = listener, None, now_s
        self.rouse(now_s)
        self._events.listener_came()

    def serves(self, listener: object) -> bool:
        """Whether `listener` is the one attached."""
        return self._listener is listener

    def detach(self, listener: object) -> None:
        """`listener` takes no more packets."""
        if self._listener is listener:
            now_s = time.monotonic()
            self.playout.leave(now_s)
            self._listener = None
            self._unheard_s = now_s if self._unheard_s is None else self._unheard_s
            self._arrived.set()

    def pause(self, listener: object, pause: Pause | None) -> None:
        """`listener` says why speech has to wait for it, or that it need not any more (None)."""
        if self._listener is not listener or pause is self._pause:
            return
        was, self._pause, now_s = self._pause, pause, time.monotonic()
        if was is Pause.UNHEARD:
            self._packets.extendleft(reversed(self.playout.rewind(now_s)))
            self._make_room()
        self._arrived.set()
        if pause is not None:
            self._unheard_s = now_s if self._unheard_s is None else self._unheard_s
        else:
            self._unheard_s = None
            self.rouse(now_s)
            self._events.listener_came()

    async def ready(self, listener: object) -> bool:
        """Wait until something is to be sent: a packet, or silence while awake. False: `listener` is not attached any more."""
        while self._listener is listener:
            if (self._packets and self._pause is None) or (self.awake(time.monotonic()) and self._pause is not Pause.STUCK):
                return True
            self._arrived.clear()
            await self._arrived.wait()
        return False

    async def next_by(self, until_s: float) -> None:
        """In mid-utterance: wait for its next packet, but no longer than `until_s`."""
        try:
            async with asyncio.timeout(max(until_s - time.monotonic(), 0)):
                while self.speaking and not self._packets:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return

    def take(self, listener: object, slot: Slot, rtp_time: int | None, now_s: float) -> Packet | None:
        """The next packet, to be sent now in `slot`; `rtp_time` is the timestamp it will have at the listener, if that is known. None:
        there is none, so silence is sent while awake; or `listener` is not attached any more."""
        if self._listener is not listener:
            return None
        if self._unheard_s is not None and self._pause is None:
            self._unheard_s = None
            self._events.listener_came()
        if not self._packets or self._pause is Pause.UNHEARD:
            if self.awake(now_s):
                self.playout.sent(slot, None, now_s)
            return None
        packet = self._packets.popleft()
        self.rouse(now_s)
        self._make_room()
        self.playout.sent(slot, packet, now_s)
        if packet.first:
            self._events.audio_started(packet.utterance, now_s, rtp_time)
        self._settle()
        return packet

    async def _encode(self, count: int, samples: int) -> None:
        if self._encoder is None:
            self._encoder = OpusEncoder()
        pcm = bytes(self._pcm[: count * PACKET_BYTES])
        del self._pcm[: count * PACKET_BYTES]
        payloads = await asyncio.get_running_loop().run_in_executor(self._encoders, self._encoder.encode, pcm)
        for payload in payloads:
            speech = min(samples, PACKET_SAMPLES)
            samples -= speech
            self._packets.append(Packet(payload, self._writing, speech, not self._begun))
            self._begun = True
        self._arrived.set()
        self._make_room()

    def _make_room(self) -> None:
        if len(self._packets) * PACKET_S < QUEUE_S:
            self._room.set()
        else:
            self._room.clear()

    def _settle(self) -> None:
        while self._ends and (not self._packets or self._packets[0].utterance > self._ends[0]):
            self._events.audio_sent(self._ends.popleft(), time.monotonic())
