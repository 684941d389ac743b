"""OpusTrack: hands aiortc ready packets at their time. aiortc's sender task is the only one that waits here."""

from __future__ import annotations

import asyncio
import logging
import time
from fractions import Fraction
from typing import Any

import av
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError

from gateway.media.line import OpusLine, Packet
from gateway.media.opus import PACKET_BYTES, OpusEncoder
from gateway.media.pacer import LEAD_S, RTP_RATE, Pacer

log = logging.getLogger(__name__)

SILENCE = OpusEncoder().encode(bytes(8 * PACKET_BYTES))[-1]
"""20 ms of digital silence, as an encoder in its stride makes it: three bytes."""
_TIME_BASE = Fraction(1, RTP_RATE)


class OpusTrack(MediaStreamTrack):
    """One listener's audio, for as long as it is the one attached to the line; then it ends."""

    kind = "audio"

    def __init__(self, line: OpusLine) -> None:
        super().__init__()
        self._line = line
        self._pacer = Pacer(time.monotonic())
        self._gap = False

    async def recv(self) -> av.Packet[Any]:
        """The next packet, when it is due. Raises MediaStreamError when the track has ended, and nothing else:
        aiortc would stop sending for good while the connection stays up."""
        while self.readyState == "live" and await self._line.ready(self):
            now_s = time.monotonic()
            planned = self._pacer.slot(now_s)
            # Sleeps even when late, so that a burst or an overloaded loop lets others run.
            await asyncio.sleep(max(planned.due_s - now_s, 0))
            # The listener still has its lead: a packet that comes within it is not late.
            await self._line.next_by(planned.due_s + LEAD_S)
            now_s = time.monotonic()
            packet = self._line.take(self, now_s)
            if packet is None and not self._line.awake(now_s):
                continue
            slot = self._pacer.slot(now_s)
            self._pacer.sent(slot)
            self._watch(packet, slot.starts_spurt and not planned.starts_spurt)
            ready = av.Packet(SILENCE if packet is None else packet.payload)
            ready.pts = slot.rtp_time
            ready.time_base = _TIME_BASE
            return ready
        raise MediaStreamError

    def _watch(self, packet: Packet | None, stalled: bool) -> None:
        """Count what the listener hears as a gap: the engine late in mid-utterance, or this process with a packet in hand."""
        gap = packet is None and self._line.speaking
        if gap and not self._gap:
            self._line.underruns += 1
            log.info("the listener ran dry: no audio yet")
        elif stalled and packet is not None and not packet.first:
            self._line.stalls += 1
            log.info("the listener of utterance %d ran dry: sent late", packet.utterance)
        self._gap = gap

    def stop(self) -> None:
        """End the track; the line's audio then waits for the next listener."""
        self._line.detach(self)
        super().stop()
