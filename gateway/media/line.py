"""A session's way out for audio: OpusLine feeds the WebRTC listener, PcmLine (gateway.media.pcm) the session's own WebSocket.

Utterances are written one after another, in order of their numbers, or to a line that mixes at once; the session is told when the first
sample of one has left and when all of it has."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import Protocol

from gateway.media.mixer import Mixer
from gateway.media.opus import RATE
from gateway.media.pacer import PACKET_TICKS, RTP_WRAP, Slot
from gateway.media.playhead import Packet, Pause, Playhead
from gateway.media.source import EncodedQueue, Source

EXPECTS_S = 0.1
"""From text to the speech that it becomes, where the engine is quick and the text was enough."""


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
        """Speech that the listener has and has not heard yet."""

    def unplayed_s(self, now_s: float) -> float:
        """That, and what is on its way."""

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

    @property
    def rtp_until(self) -> int | None:
        """The RTP timestamp behind all that was sent, if there is one that is known."""

    def begin(self, utterance: int, after: int | None) -> None:
        """`utterance` is going to be written, and is to sound behind the end of `after`."""

    async def write(self, utterance: int, pcm: bytes) -> None:
        """More s16le audio of `utterance`; waits while the line is full."""

    async def end(self, utterance: int) -> None:
        """`utterance` is complete."""

    def drop(self, doomed: Collection[int], now_s: float) -> None:
        """Nothing more of these utterances may leave. The caller has stopped writing them."""


class OpusLine:
    """Keeps what its source makes until the attached listener's track takes it at its time.

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
        self._awake_s = awake_s
        self._awake_until_s = self._roused_s = float("-inf")
        self._awaited: set[int] = set()
        """Utterances that are going to be written and have not been heard of."""
        self._listener: object | None = None
        self._pause: Pause | None = None
        self._unheard_s: float | None = None
        """Since when nobody has been there to hear what is sent; None: somebody is."""
        self._rtp_until: int | None = None
        self._arrived = asyncio.Event()
        self._source = self._new_source(at_once=False)

    def rouse(self, now_s: float) -> None:
        """Speech is to be expected: for `awake_s` from now the stream runs on where there is none."""
        self._roused_s = now_s
        self._awake_until_s = now_s + self._awake_s
        self._arrived.set()

    def awake(self, now_s: float) -> bool:
        """Whether silence is to be sent where there is no speech."""
        return now_s < self._awake_until_s

    @property
    def paused(self) -> bool:
        """Whether speech waits for the listener."""
        return self._pause is not None

    @property
    def attached(self) -> bool:
        """Whether there is a listener."""
        return self._listener is not None

    @property
    def queued_s(self) -> float:
        """See Line."""
        return self._source.queued_s

    @property
    def rtp_until(self) -> int | None:
        """See Line."""
        return self._rtp_until

    def expecting(self, now_s: float) -> bool:
        """Whether text has come just now, and the speech that it may become has not."""
        return bool(self._awaited) and self._pause is None and now_s - self._roused_s < EXPECTS_S

    def sounding(self, now_s: float) -> bool:
        """Whether there is speech that the listener has not heard yet."""
        return self._source.ready or self._source.speaking or not self.playout.dry(now_s)

    def unheard_for(self, now_s: float) -> float:
        """Seconds for which nobody has taken any packets: no listener, or one that is not connected yet or is paused."""
        return 0.0 if self._unheard_s is None else now_s - self._unheard_s

    @property
    def speaking(self) -> bool:
        """In mid-utterance: the listener hears it, and more of it is to come from the engine."""
        return self._source.speaking and self._pause is None

    def begin(self, utterance: int, after: int | None) -> None:
        """See Line."""
        self._awaited.add(utterance)
        self._source.begin(utterance, after)

    async def write(self, utterance: int, pcm: bytes) -> None:
        """See Line."""
        await self._source.write(utterance, pcm)

    async def end(self, utterance: int) -> None:
        """See Line."""
        await self._source.end(utterance)
        self._awaited.discard(utterance)
        self._settle()

    def drop(self, doomed: Collection[int], now_s: float) -> None:
        """See Line."""
        self._source.drop(doomed)
        self._awaited.difference_update(doomed)
        self.playout.drop(doomed, now_s)

    def mix(self, at_once: bool) -> None:
        """Whether utterances may sound at once from now on. Only while nothing is being spoken."""
        if at_once is not isinstance(self._source, Mixer):
            self._source = self._new_source(at_once)

    def _new_source(self, at_once: bool) -> Source:
        return (Mixer if at_once else EncodedQueue)(self._encoders, self._arrived.set)

    def attach(self, listener: object) -> None:
        """From now on `listener` takes the packets, and nobody else."""
        now_s = time.monotonic()
        self._source.put_back(self.playout.begin(now_s))
        self._listener, self._pause, self._unheard_s, self._rtp_until = listener, None, now_s, None
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
            self._source.put_back(self.playout.rewind(now_s))
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
            if self._source.ready and self._pause is None:
                await self._source.prepare()
                return self._listener is listener
            if self.awake(time.monotonic()) and self._pause is not Pause.STUCK:
                return True
            self._arrived.clear()
            await self._arrived.wait()
        return False

    async def next_by(self, until_s: float) -> None:
        """In mid-utterance: wait for its next packet, but no longer than `until_s`."""
        if self.speaking:
            await self._packet_by(until_s, lambda: self.speaking)
        if self._source.ready:
            await self._source.prepare()

    async def first_by(self, until_s: float) -> None:
        """In silence: wait for the first packet of speech, but no longer than `until_s`; a little longer where it may come any moment."""
        await self._packet_by(until_s, lambda: self._pause is not Pause.STUCK)
        if self.expecting(time.monotonic()):
            await self._packet_by(until_s + EXPECTS_S, lambda: bool(self._awaited))
        if self._source.ready:
            await self._source.prepare()

    async def _packet_by(self, until_s: float, may_come: Callable[[], bool]) -> None:
        left_s = until_s - time.monotonic()
        if self._source.ready or left_s <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                while may_come() and not self._source.ready:
                    self._arrived.clear()
                    await self._arrived.wait()

    def take(self, listener: object, slot: Slot, rtp_time: int | None, now_s: float, *, speech: bool = True) -> Packet | None:
        """The next packet, to be sent now in `slot`; `rtp_time` is the timestamp it will have at the listener, if that is known. None:
        there is none, or it is not to be `speech`, so silence is sent while awake; or `listener` is not attached any more."""
        if self._listener is not listener:
            return None
        if self._unheard_s is not None and self._pause is None:
            self._unheard_s = None
            self._events.listener_came()
        packet = self._source.take() if speech and self._pause is not Pause.UNHEARD else None
        if packet is not None or self.awake(now_s):
            self._rtp_until = None if rtp_time is None else (rtp_time + PACKET_TICKS) % RTP_WRAP
        if packet is None:
            if self.awake(now_s):
                self.playout.sent(slot, None, now_s)
            return None
        self.rouse(now_s)
        self.playout.sent(slot, packet, now_s)
        for share in packet.shares:
            if share.first:
                self._awaited.discard(share.utterance)
                self._events.audio_started(share.utterance, now_s, rtp_time)
        self._settle()
        return packet

    def _settle(self) -> None:
        for utterance in self._source.over():
            self._events.audio_sent(utterance, time.monotonic())
