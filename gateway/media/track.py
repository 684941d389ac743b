"""OpusTrack: hands aiortc ready packets at their time. aiortc's sender task is the only one that waits here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError

from gateway.media.line import OpusLine
from gateway.media.opus import PACKET_BYTES, OpusEncoder
from gateway.media.pacer import LEAD_S, RTP_RATE, RTP_WRAP, Pacer
from gateway.media.playhead import Packet
from gateway.media.reserve import Reserve

log = logging.getLogger(__name__)

SILENCE = OpusEncoder().encode(bytes(8 * PACKET_BYTES))[-1]
"""20 ms of digital silence, as an encoder in its stride makes it: three bytes."""
IN_HAND_S = 0.03
"""Speech that is kept here for what the engine makes next to join, while more is sent ahead."""
_TIME_BASE = Fraction(1, RTP_RATE)


class OpusTrack(MediaStreamTrack):
    """One listener's audio, for as long as it is the one attached to the line; then it ends."""

    kind = "audio"

    def __init__(self, line: OpusLine, reserve: Reserve, lead_s: float = LEAD_S) -> None:
        super().__init__()
        self.wire_time: Callable[[], int] | None = None
        """The RTP timestamp of the packet that was sent last; aiortc adds a random number to ours, and tells nobody."""
        self._line = line
        self.reserve = reserve
        self._in_speech = False
        self._lacks_s = 0.0
        """How much further ahead this speech is still to be sent."""
        self._pacer = Pacer(time.monotonic(), lead_s)
        self._gap = False
        self._last: int | None = None
        self._origin: int | None = None

    def on_wire(self, rtp_time: int) -> int | None:
        """The timestamp that goes with a time of ours; None until a packet has left."""
        return None if self._origin is None else (self._origin + rtp_time) % RTP_WRAP

    def from_wire(self, timestamp: int) -> int | None:
        """Our time for a timestamp that the listener names: the one nearest to what was sent last. None until a packet has left."""
        if self._origin is None or self._last is None:
            return None
        behind = (self._origin + self._last - timestamp) % RTP_WRAP
        return self._last - (behind if behind < RTP_WRAP // 2 else behind - RTP_WRAP)

    async def recv(self) -> av.Packet[Any]:
        """The next packet, when it is due. Raises MediaStreamError when the track has ended, and nothing else:
        aiortc would stop sending for good while the connection stays up."""
        while self.readyState == "live" and await self._line.ready(self):
            now_s = time.monotonic()
            planned = self._pacer.slot(now_s)
            # Sleeps even when late, so that a burst or an overloaded loop lets others run.
            await asyncio.sleep(max(planned.due_s - now_s, 0))
            # The listener still has its lead: a packet that comes within it is not late.
            spare_s = self._pacer.lead_s + self._line.playout.spare_s(now_s)
            await self._line.next_by(planned.due_s + spare_s, planned.due_s + self.reserve.patience_s(now_s))
            now_s = time.monotonic()
            slot = self._pacer.slot(now_s)
            if self._origin is None and self._last is not None and self.wire_time is not None:
                self._origin = (self.wire_time() - self._last) % RTP_WRAP
            packet = self._line.take(self, slot, self.on_wire(slot.rtp_time), now_s)
            if packet is None and not self._line.awake(now_s):
                continue
            self._pacer.sent(slot)
            self._last = slot.rtp_time
            self._watch(packet, slot.starts_spurt and not planned.starts_spurt)
            self._adjust(packet is not None, now_s)
            ready = av.Packet(SILENCE if packet is None else packet.payload)
            ready.pts = slot.rtp_time
            ready.time_base = _TIME_BASE
            return ready
        raise MediaStreamError

    def _adjust(self, speech: bool, now_s: float) -> None:
        """Send more ahead from now on where speech begins, less in silence."""
        by_s = 0.0
        if not speech:
            self._lacks_s = 0.0
            by_s = -self.reserve.ease(now_s)
        elif not self._in_speech:
            self._lacks_s = self.reserve.begin(now_s)
        if self._lacks_s > 0.0:
            # No more than there is: what then came late would look like a bad network.
            spare_s = self._pacer.slot(now_s).due_s + self._line.queued_s - now_s - IN_HAND_S
            by_s = max(min(self._lacks_s, spare_s), 0.0)
            self._lacks_s -= by_s
        if by_s:
            self._pacer.hurry(by_s)
            self._line.playout.hurried(by_s)
        self._in_speech = speech

    def _watch(self, packet: Packet | None, stalled: bool) -> None:
        """Count what the listener hears as a gap: the engine late in mid-utterance, or this process with a packet in hand."""
        gap = packet is None and self._line.speaking
        if gap and not self._gap:
            self._line.underruns += 1
            log.info("the listener ran dry: no audio yet")
        elif stalled and packet is not None and not packet.begins:
            self._line.stalls += 1
            log.info("the listener of utterance %d ran dry: sent late", packet.shares[0].utterance)
        self._gap = gap

    def stop(self) -> None:
        """End the track; the line's audio then waits for the next listener."""
        self._line.detach(self)
        super().stop()
