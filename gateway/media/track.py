"""OpusTrack: hands aiortc ready packets at their time. aiortc's sender task is the only one that waits here."""

from __future__ import annotations

import asyncio
import contextlib
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
from gateway.media.pacer import LEAD_S, RTP_RATE, RTP_WRAP, Pacer, Slot
from gateway.media.playhead import USUAL_DELAY_S, Packet
from gateway.media.reserve import COLD_S, START_SOON_S, Reserve

log = logging.getLogger(__name__)

SILENCE = OpusEncoder().encode(bytes(8 * PACKET_BYTES))[-1]
"""20 ms of digital silence, as an encoder in its stride makes it: three bytes."""
COMFORT = SILENCE[:1]
"""A packet with nothing in it, as an Opus encoder with DTX sends it: the listener makes the silence up until the next one comes, and begins to
play that whenever its time has come, without a buffer to be played first."""
COMFORT_EVERY_S = 0.2
LOOSE_S = 0.03
"""As much more than it is to hold in silence a listener may keep: more is not worth moving its RTP time."""
MARGIN_S = 0.005
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
        self._sparse = reserve.new
        """Silence is sent as comfort noise, a packet now and then."""
        self._due_s = 0.0
        """When the last packet was."""
        self._lacks_s = 0.0
        """How much further ahead this speech is still to be sent."""
        self._pacer = Pacer(time.monotonic(), lead_s)
        self._gap = False
        self._last: int | None = None
        self._origin: int | None = None
        self._reported = asyncio.Event()
        self._transit_s = 0.0

    def report(self, target_s: float | None, depth_s: float, network_s: float | None, now_s: float, *, stood_s: float, transit_s: float) -> None:
        """The listener reports: see Reserve. `stood_s`: its output stood so long; `transit_s`: what is sent to it takes so long."""
        if self.reserve.awaited:
            # For its receiver no time has passed while its output stood. Where it is follows from when its first packet left: its word for that
            # may have come a long way.
            stood_s = min(stood_s, COLD_S)
            self._pacer.stood(stood_s)
            self._line.playout.hurried(-stood_s)
            self._line.playout.expect(START_SOON_S - self._pacer.lead_s)
        self._transit_s = transit_s
        self.reserve.report(target_s, depth_s, network_s, self._line.sounding(now_s), now_s)
        self._reported.set()

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
        if self._origin is None and self._last is not None and self.wire_time is not None:
            self._origin = (self.wire_time() - self._last) % RTP_WRAP
        while self.readyState == "live" and await self._line.ready(self):
            opens = self._sparse and self._last is None
            slot, late = self._open() if opens else await (self._alone() if self._sparse else self._in_turn())
            now_s = time.monotonic()
            # Asleep, the line takes speech alone: there is nothing else to be sent first.
            speech = not self._line.awake(now_s) or not (opens or self.reserve.awaited)
            packet = self._line.take(self, slot, self.on_wire(slot.rtp_time), now_s, speech=speech)
            if packet is None and not self._line.awake(now_s):
                continue
            self._pacer.sent(slot, now_s)
            self._last, self._due_s = slot.rtp_time, slot.due_s
            self._watch(packet, late)
            self._adjust(packet is not None, now_s)
            ready = av.Packet(packet.payload if packet is not None else COMFORT if self._sparse else SILENCE)
            ready.pts = slot.rtp_time
            ready.time_base = _TIME_BASE
            return ready
        raise MediaStreamError

    async def _in_turn(self) -> tuple[Slot, bool]:
        """The next packet's place when it is due, and whether it comes after its listener has run dry."""
        now_s = time.monotonic()
        planned = self._pacer.slot(now_s)
        # Sleeps even when late, so that a burst or an overloaded loop lets others run.
        await asyncio.sleep(max(planned.due_s - now_s, 0))
        # The listener still has its lead: a packet that comes within it is not late.
        await self._line.next_by(planned.due_s + self._pacer.lead_s + self._line.playout.spare_s(now_s))
        slot = self._pacer.slot(time.monotonic())
        return slot, slot.starts_spurt and not planned.starts_spurt

    async def _alone(self) -> tuple[Slot, bool]:
        """The place of the first packet of speech as soon as it is there, or of more comfort noise."""
        await asyncio.sleep(0)
        if self.reserve.awaited:
            # Nothing more until then: its clock stands still as long as its output, and what has come meanwhile would have come all at once.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COLD_S):
                    await self._reported.wait()
        await self._line.first_by(self._due_s + COMFORT_EVERY_S)
        now_s = time.monotonic()
        ahead_s = self._go_back(now_s, self._line.queued_s > 0.0 and not self.reserve.awaited)
        if ahead_s > 0.0:
            # Sent now it would be played no sooner, and all that follows would be held for so much longer.
            await asyncio.sleep(ahead_s)
            now_s += ahead_s
        return self._pacer.alone(now_s), False

    def _open(self) -> tuple[Slot, bool]:
        """The place of the first packet of all. A listener plays it as soon as it has it, without a buffer; of speech, it would want one."""
        now_s = time.monotonic()
        self._pacer.hurry(-self._pacer.off_s(now_s))
        self._line.playout.expect(START_SOON_S - self._pacer.lead_s)
        return self._pacer.alone(now_s), False

    def _go_back(self, now_s: float, speech: bool) -> float:
        """Give the next packet the RTP time at which its listener is already, so that it is played when it comes. Returns how much later
        it is to leave, 0 or more."""
        depth_s = self._depth_s
        over_s = depth_s - self.reserve.least_s
        if not speech and over_s <= LOOSE_S:
            return 0.0
        room_s = max(self._pacer.room_s(now_s, self.reserve.less_prompt_s), 0.0)
        back_s = max(over_s + MARGIN_S, 0.0)
        if not speech:
            self._hurry(-min(back_s, room_s))
            return 0.0
        # Nothing is rounded, or it would be played later by as much.
        back_s = self._pacer.back_s(now_s, back_s, min(room_s, depth_s - self.reserve.first_waits_s(self._line.queued_s, now_s)))
        later_s = max(min(-back_s, depth_s - back_s - self.reserve.speech_s), 0.0)
        self._hurry(-back_s - later_s)
        return later_s

    @property
    def _depth_s(self) -> float:
        """How long a packet that leaves now would wait there to be played."""
        return self._pacer.lead_s + self._line.playout.delay_s - self._transit_s

    def _hurry(self, by_s: float) -> None:
        if by_s:
            self._pacer.hurry(by_s)
            self._line.playout.hurried(by_s)

    def _adjust(self, speech: bool, now_s: float) -> None:
        """Send more ahead from now on where speech begins, and next to nothing in silence."""
        if not speech:
            # Whoever plays to nobody needs a moment to be heard again, and keeps what it held.
            was_new = self.reserve.new
            if self._line.paused:
                # From now on it is sent silence like sound.
                self.reserve.new = False
            holds_s = self._depth_s + self._pacer.behind_s(now_s)
            self._lacks_s, self._sparse = 0.0, not self._line.paused and self.reserve.quiet(holds_s, now_s)
            if was_new and not self._sparse and not self._line.playout.measured(now_s):
                # It fills its buffer from now on.
                self._line.playout.expect(USUAL_DELAY_S)
        elif not self._in_speech:
            self._lacks_s = self.reserve.begin(self._depth_s if self._sparse else None, now_s)
            self._sparse = False
        if self._lacks_s > 0.0:
            # No more than there is: what then came late would look like a bad network.
            spare_s = self._pacer.slot(now_s).due_s + self._line.queued_s - now_s
            by_s = max(min(self._lacks_s, spare_s), 0.0)
            self._lacks_s -= by_s
            self._hurry(by_s)
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
        self._reported.set()
        super().stop()
