"""Pacer: when each 20 ms packet leaves and which RTP time it carries. Pure; the clock comes in as `now_s`.

RTP time is wall-clock time: it runs on through pauses, in whole packets, so that a receiver takes the next packet for one after
a pause and not for a late one. A spurt starts with its lead, three packets at once by default, and keeps it; within a spurt packet times lie
on an absolute schedule, so that lateness never accumulates. Silence counts as well as speech (gateway.media.line): a spurt
lasts as long as the stream runs."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

RTP_RATE = 48000
RTP_WRAP = 1 << 32
PACKET_TICKS = 960
PACKET_S = PACKET_TICKS / RTP_RATE
BURST_PACKETS = 3
LEAD_S = (BURST_PACKETS - 1) * PACKET_S
TRANSIT_S = 0.04
"""A receiver holds the lead and what the network and its own clock add, 70 to 80 ms in all on a good network. With a
jitterBufferTarget of 80 ms that lies in the band in which it leaves speech alone."""
GRACE_S = 0.04
"""How far beyond the end of what was sent a packet may still join the spurt: a receiver's own buffer bridges about this much."""

MEMORY_S = 2.1
"""For so long a browser remembers how prompt packets were."""
REMEMBERS_S = 1.7
"""For so long at the least, and as long again as it may take to tell it what follows from its forgetting."""
ALMOST = 1e-3
"""Of a packet: what floats may be wrong by, and more."""
LONE_LASTS_S = 1.0
"""A browser plays on so long in comfort noise behind a lone packet, and then as if packets were lost."""


def lead_for(target_s: float) -> float:
    """How far ahead to send to a receiver that is told to hold `target_s`, in whole packets: more or less than it holds would be
    played faster or slower."""
    return max(1, round((target_s - TRANSIT_S) / PACKET_S)) * PACKET_S


class Slot(NamedTuple):
    """Where the next packet goes."""

    due_s: float
    rtp_time: int
    starts_spurt: bool
    plays_s: float
    """When a listener without any delay would begin to play it."""
    lasts_s: float = PACKET_S
    """How long its listener may be at it."""


class Pacer:
    """The schedule of one RTP stream, `lead_s` ahead of its listener. Ask for the next `slot`, wait until it is due, send, say `sent`."""

    def __init__(self, epoch_s: float, lead_s: float = LEAD_S) -> None:
        self.lead_s = lead_s
        self._epoch_s = epoch_s
        self._anchor_s = epoch_s
        self._anchor_rtp = 0
        self._next_rtp = 0
        self._begun = False
        self._promptest: deque[tuple[float, float]] = deque()
        """Of the last MEMORY_S, falling: when a packet left, and how far ahead of that its RTP time was."""

    def slot(self, now_s: float) -> Slot:
        """The next packet's place, if it is ready now. A packet that comes after the listener has run dry starts a new spurt."""
        plays_s = self._anchor_s + (self._next_rtp - self._anchor_rtp) / RTP_RATE
        if self._begun and now_s <= plays_s + GRACE_S:
            return Slot(plays_s - self.lead_s, self._next_rtp, False, plays_s)
        wall_rtp = round((now_s - self._epoch_s) * RTP_RATE / PACKET_TICKS) * PACKET_TICKS
        return Slot(now_s, max(wall_rtp, self._next_rtp), True, now_s)

    def alone(self, now_s: float) -> Slot:
        """The place of a packet that leaves now, whenever the last one left: as far ahead as all others."""
        plays_s = now_s + self.lead_s
        wall_rtp = round((plays_s - self._epoch_s) * RTP_RATE / PACKET_TICKS) * PACKET_TICKS
        return Slot(now_s, max(wall_rtp, self._next_rtp), True, plays_s, LONE_LASTS_S)

    def room_s(self, now_s: float, less_prompt_s: float) -> float:
        """By how much the RTP time of a packet that leaves alone can go back, 0 or less if it cannot: behind the last one, and no more than
        `less_prompt_s` behind the promptest that its listener remembers."""
        # By RTP time a browser remembers: after a pause it still knows the last one.
        while len(self._promptest) > 1 and self._promptest[0][0] < now_s - MEMORY_S:
            self._promptest.popleft()
        prompt_s = self.lead_s - self._epoch_s
        least_s = self._promptest[0][1] - less_prompt_s if self._promptest else -math.inf
        return prompt_s - max(least_s, self._next_rtp / RTP_RATE - now_s)

    def behind_s(self, now_s: float) -> float:
        """How much less prompt than the promptest that its listener will remember for a while a packet is that leaves now."""
        promptest_s = next((prompt_s for left_s, prompt_s in self._promptest if left_s >= now_s - REMEMBERS_S), -math.inf)
        return max(promptest_s - (self.lead_s - self._epoch_s), 0.0)

    def off_s(self, now_s: float) -> float:
        """How far this moment lies behind one at which a packet's RTP time would need no rounding."""
        return (now_s - self._epoch_s) % PACKET_S

    def back_s(self, now_s: float, wanted_s: float, room_s: float) -> float:
        """How far the RTP time of a packet that leaves alone is to go back, so that it needs no rounding: `wanted_s` or up to a packet more,
        by whole packets less where that would be more than `room_s`. Negative: it runs ahead."""
        back_s = wanted_s + self.off_s(now_s - wanted_s)
        # Right behind the last packet there is exactly as much room as it takes: not one packet less for a rounding of floats.
        return back_s - max(math.ceil((back_s - room_s) / PACKET_S - ALMOST), 0) * PACKET_S

    def hurry(self, by_s: float) -> None:
        """All that comes is due so much earlier: its RTP time runs on, and the wall clock that it goes by moves."""
        self._anchor_s -= by_s
        self._epoch_s -= by_s

    def stood(self, for_s: float) -> None:
        """The listener's clock has stood still for so long: what comes is due so much later, and for it no less prompt than what came before."""
        self.hurry(-for_s)
        self._promptest = deque((left_s, prompt_s - for_s) for left_s, prompt_s in self._promptest)

    def sent(self, slot: Slot, now_s: float) -> None:
        """The packet has left in this slot."""
        if slot.starts_spurt:
            self._anchor_s, self._anchor_rtp, self._begun = slot.plays_s, slot.rtp_time, True
        prompt_s = slot.rtp_time / RTP_RATE - now_s
        while self._promptest and self._promptest[-1][1] <= prompt_s:
            self._promptest.pop()
        self._promptest.append((now_s, prompt_s))
        self._next_rtp = slot.rtp_time + PACKET_TICKS
