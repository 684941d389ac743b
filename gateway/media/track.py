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

from gateway.media.line import OpusLine
from gateway.media.pacer import RTP_RATE, Pacer

log = logging.getLogger(__name__)

_TIME_BASE = Fraction(1, RTP_RATE)


class OpusTrack(MediaStreamTrack):
    """One listener's audio, for as long as it is the one attached to the line; then it ends."""

    kind = "audio"

    def __init__(self, line: OpusLine) -> None:
        super().__init__()
        self._line = line
        self._pacer = Pacer(time.monotonic())
        self._begun = False

    async def recv(self) -> av.Packet[Any]:
        """The next packet, when it is due. Raises MediaStreamError when the track has ended, and nothing else:
        aiortc would stop sending for good while the connection stays up."""
        while self.readyState == "live" and await self._line.ready(self):
            now_s = time.monotonic()
            planned = self._pacer.slot(now_s)
            # Sleeps even when late, so that a burst or an overloaded loop lets others run.
            await asyncio.sleep(max(planned.due_s - now_s, 0))
            now_s = time.monotonic()
            packet = self._line.take(self, now_s)
            if packet is None:
                continue
            # Asked again: after a stall of this process the listener has run dry, and this packet begins a new spurt.
            slot = self._pacer.slot(now_s)
            self._pacer.sent(slot)
            if slot.starts_spurt and self._begun and not packet.first:
                if planned.starts_spurt:
                    self._line.underruns += 1
                else:
                    self._line.stalls += 1
                log.info("the listener of utterance %d ran dry: %s", packet.utterance, "no audio yet" if planned.starts_spurt else "sent late")
            self._begun = True
            ready = av.Packet(packet.payload)
            ready.pts = slot.rtp_time
            ready.time_base = _TIME_BASE
            return ready
        raise MediaStreamError

    def stop(self) -> None:
        """End the track; the line's audio then waits for the next listener."""
        self._line.detach(self)
        super().stop()
