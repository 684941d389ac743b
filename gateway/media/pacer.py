"""Pacer: when each 20 ms packet leaves and which RTP time it carries. Pure; the clock comes in as `now_s`.

RTP time is wall-clock time: it runs on through pauses, in whole packets, so that a receiver takes the next packet for one after
a pause and not for a late one. A spurt starts with three packets at once and keeps that lead; within a spurt packet times lie
on an absolute schedule, so that lateness never accumulates. Silence counts as well as speech (gateway.media.line): a spurt
lasts as long as the stream runs."""

from __future__ import annotations

from typing import NamedTuple

RTP_RATE = 48000
PACKET_TICKS = 960
PACKET_S = PACKET_TICKS / RTP_RATE
BURST_PACKETS = 3
LEAD_S = (BURST_PACKETS - 1) * PACKET_S
"""A receiver holds the lead and what the network and its own clock add, 70 to 80 ms in all on a good network. With a
jitterBufferTarget of 80 ms (web/listener.js) that lies in the band in which it leaves speech alone."""
GRACE_S = 0.04
"""How far beyond the end of what was sent a packet may still join the spurt: a receiver's own buffer bridges about this much."""


class Slot(NamedTuple):
    """Where the next packet goes."""

    due_s: float
    rtp_time: int
    starts_spurt: bool


class Pacer:
    """The schedule of one RTP stream. Ask for the next `slot`, wait until it is due, send, say `sent`."""

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._anchor_s = epoch_s
        self._anchor_rtp = 0
        self._next_rtp = 0
        self._begun = False

    def slot(self, now_s: float) -> Slot:
        """The next packet's place, if it is ready now. A packet that comes after the listener has run dry starts a new spurt."""
        plays_s = self._anchor_s + (self._next_rtp - self._anchor_rtp) / RTP_RATE
        if self._begun and now_s <= plays_s + GRACE_S:
            return Slot(plays_s - LEAD_S, self._next_rtp, False)
        wall_rtp = round((now_s - self._epoch_s) * RTP_RATE / PACKET_TICKS) * PACKET_TICKS
        return Slot(now_s, max(wall_rtp, self._next_rtp), True)

    def sent(self, slot: Slot) -> None:
        """The packet has left in this slot."""
        if slot.starts_spurt:
            self._anchor_s, self._anchor_rtp, self._begun = slot.due_s, slot.rtp_time, True
        self._next_rtp = slot.rtp_time + PACKET_TICKS
