"""Feedback: what a listener says about its playback, checked, and made the line's playhead. Pure.

A listener may be broken or lie. It is believed where an honest one could have said the same: it plays what was sent, in order, no
sooner than without any buffer. So no report makes a listener look nearer to running dry than one that keeps nothing in hand."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Literal

from gateway.events import Stats
from gateway.media.pacer import PACKET_S
from gateway.media.playhead import Pause, Playhead

log = logging.getLogger(__name__)

MOST_PER_S = 10
STANDS_S = 0.1
"""A receiver that plays goes on to the next packet every 20 ms; one whose playhead is older than this stands still."""
MOST_RTT_S = 1.0
RTTS = 25
"""Reports, five seconds: a page that is busy answers late, the network is as quick as the quickest."""
ANSWERS_S = 0.03
"""As late a page answers though nothing but its own start keeps it busy."""
EARLIEST_S = 0.06
"""The least delay: how long before its time (gateway.media.pacer) a receiver that holds next to nothing plays a packet."""
ARRIVED_PACKETS = 5
"""A listener that stands still while this many packets arrive is paused; where none arrive, the network is to blame."""
PLAYED_UNSEEN_S = 0.5
"""Concealment counted between two reports is at most this much longer than the time between them."""

Refusal = Literal["too_many", "never_sent", "backwards"]


class Feedback:
    """The reports of one listener, from its first to its last. A page that restarts is another listener."""

    def __init__(self, playhead: Playhead) -> None:
        self.refused: Counter[Refusal] = Counter()
        self.pause: Pause | None = None
        self.rtt_s = 0.0
        self._rtts_s: deque[float] = deque(maxlen=RTTS)
        self.buffer_s = 0.0
        """The depth of its buffer, as it says."""
        self.concealed_s = 0.0
        """Sound it had to make up while there was speech to be heard."""
        self._playhead = playhead
        self._times: deque[float] = deque(maxlen=MOST_PER_S)
        self._rtp_time = -1
        self._since_s = 0.0
        """When it first said so."""
        self._received_then = 0
        self._stands = False
        self._in_speech = False
        self._concealed: tuple[float, float] | None = None
        """The listener's count, and when it said so."""

    @property
    def transit_s(self) -> float:
        """How long a packet is on its way to it, or a little less: more would have it sent too far ahead."""
        return max(min(self._rtts_s, default=0.0) - ANSWERS_S, 0.0) / 2

    def take(self, stats: Stats, rtp_time: int | None, now_s: float) -> Refusal | None:
        """Act on one report. `rtp_time` is its playhead on the pacer's clock, None if it names none. Returns why it was refused."""
        refusal = self._check(rtp_time, now_s)
        if refusal is not None:
            self.refused[refusal] += 1
            if self.refused[refusal] == 1:
                log.warning("a listener's report was refused: %s (further ones are only counted)", refusal)
            return refusal
        if stats.rtt_ms is not None and stats.rtt_ms <= MOST_RTT_S * 1000:
            self.rtt_s = stats.rtt_ms / 1000
            self._rtts_s.append(self.rtt_s)
        self.buffer_s = stats.buffer_ms / 1000
        if stats.paused:
            self._playhead.stand(now_s)
            self.pause = Pause.UNHEARD
        elif self.pause is Pause.UNHEARD:
            # Where it is now is silence; the line goes on from where it was paused, and the next report tells of that.
            self.pause = None
        elif rtp_time is not None:
            self._move(rtp_time, stats, now_s)
        else:
            self.pause = None
        self._count(stats.concealed_ms / 1000, now_s)
        return None

    def _check(self, rtp_time: int | None, now_s: float) -> Refusal | None:
        if len(self._times) == MOST_PER_S and now_s - self._times[0] < 1.0:
            return "too_many"
        self._times.append(now_s)
        if rtp_time is None:
            return None
        last = self._playhead.last_rtp_time
        if last is None or rtp_time > last:
            return "never_sent"
        return "backwards" if rtp_time < self._rtp_time else None

    def _move(self, rtp_time: int, stats: Stats, now_s: float) -> None:
        sent = self._playhead.find(rtp_time)
        if sent is None:
            # It stands where nobody remembers what was there.
            self.pause = None
            return
        if rtp_time != self._rtp_time:
            self._rtp_time, self._since_s, self._received_then = rtp_time, now_s, stats.received
        # Its word for how long it has been there counts only as far as it makes it stand longer.
        age_s = max(stats.age_ms / 1000, now_s - self._since_s)
        self._stands = age_s > STANDS_S + sent.lasts_s - PACKET_S
        if self._stands:
            self._playhead.report(sent.plays_s + PACKET_S, True, now_s)
        else:
            self._playhead.report(min(sent.plays_s + age_s + self.rtt_s / 2, now_s + EARLIEST_S), False, now_s)
        if stats.received < self._received_then:
            self._received_then = stats.received
        arrived = stats.received - self._received_then
        self.pause = Pause.STUCK if self._stands and arrived >= (1 if self.pause is Pause.STUCK else ARRIVED_PACKETS) else None

    def _count(self, concealed_s: float, now_s: float) -> None:
        """Made-up sound counts where speech was to be heard before and after it; the counter runs on in silence."""
        was, self._in_speech = self._in_speech, self._playhead.in_speech(now_s)
        before, self._concealed = self._concealed, (concealed_s, now_s)
        if before is None or concealed_s < before[0]:
            # The first, or counters that began anew.
            return
        more_s = min(concealed_s - before[0], now_s - before[1] + PLAYED_UNSEEN_S)
        if was and self._in_speech and more_s > 0.0 and self.pause is None:
            self.concealed_s += more_s
            log.info("a listener ran dry in speech: %.0f ms of its sound were made up", more_s * 1000)
