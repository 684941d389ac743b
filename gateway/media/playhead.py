"""Playhead: what an RTP listener has heard, by its own word, or by estimate while there is none. Pure; counts are samples.

Every packet has a time at which a listener without any delay would begin to play it (gateway.media.pacer). A listener is as far as
the packet for which that time was `delay` ago: a report measures the delay, and it holds until the next one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator
from enum import Enum, auto

import msgspec

from gateway.media.pacer import PACKET_S, TRANSIT_S, Slot

USUAL_DELAY_S = TRANSIT_S
"""Of a browser on a good network that does not say."""
STALE_S = 2.0
"""A report older than this is no news; the estimate runs on from it."""
UNTOLD_S = 0.3
"""From one report to the next, and what a listener then had in hand."""
KEEP_S = 4.0
"""Packets are remembered for this long after they should have been played: a report may still name one."""
MOST_KEPT = 2000
"""Packets remembered of a listener that has stopped reporting and may not have heard them."""


# Of these three a listener has a thousand at a time, for seconds, and none in a cycle: kept from the garbage collector, which would hold up
# every packet while it looks at them all.


class Share(msgspec.Struct, frozen=True, gc=False):
    """One utterance's part in a packet. `samples` counts those that are speech and not padding; `first`: it begins with them. `pcm` is
    s16le, where it may have to be mixed again."""

    utterance: int
    samples: int
    first: bool
    pcm: bytes = b""


class Packet(msgspec.Struct, frozen=True, gc=False):
    """20 ms of Opus, and the utterances that sound in it."""

    payload: bytes
    shares: tuple[Share, ...]

    @property
    def samples(self) -> int:
        """Until the last of its utterances ends."""
        return max(share.samples for share in self.shares)

    @property
    def begins(self) -> bool:
        """Whether no utterance was under way before it."""
        return all(share.first for share in self.shares)

    def without(self, doomed: Collection[int]) -> Packet | None:
        """As if these utterances had never been; None if nothing is left."""
        shares = tuple(share for share in self.shares if share.utterance not in doomed)
        return Packet(self.payload, shares) if shares else None


class Pause(Enum):
    """Why speech waits although a listener is attached."""

    UNHEARD = auto()
    """It plays to nobody. It is sent silence as otherwise; afterwards, again what nobody heard."""
    STUCK = auto()
    """It does not play what reaches it, and would overflow."""


class Sent(msgspec.Struct, frozen=True, gc=False):
    """A packet on the wire; `packet` None is silence."""

    rtp_time: int
    plays_s: float
    packet: Packet | None
    lasts_s: float = PACKET_S
    """How long its listener may be at it: longer than the packet is where the next one is sent later."""

    def with_packet(self, packet: Packet | None) -> Sent:
        """The same moment, with this instead."""
        return Sent(self.rtp_time, self.plays_s, packet, self.lasts_s)


class Playhead:
    """One line's listeners, one after the other. Times are monotonic seconds."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._sent: deque[Sent] = deque()
        self._count: dict[int, int] = {}
        """Samples of each utterance that were sent, but for those that are to be sent again."""
        self._delay_s = self._running_delay_s = USUAL_DELAY_S
        self._stands_at_s: float | None = None
        """As a time of `plays_s`: where a listener that does not play has stopped."""
        self._reported_s = float("-inf")
        self._gone = False

    # What is known

    def begin(self, now_s: float) -> list[Packet]:
        """Somebody else listens from now on. Returns what was sent and not heard to its end, to be sent again."""
        again = self.rewind(now_s)
        self._sent.clear()
        self._delay_s = self._running_delay_s = USUAL_DELAY_S
        self._reported_s, self._gone = float("-inf"), False
        return again

    def rewind(self, now_s: float) -> list[Packet]:
        """The listener plays on after having stood still, without what it had in hand. Returns that, to be sent again."""
        content_s = self._content(now_s)
        again = [sent.packet for sent in self._sent if sent.packet is not None and sent.plays_s + PACKET_S > content_s]
        for packet in again:
            for share in packet.shares:
                if share.utterance in self._count:
                    self._count[share.utterance] -= share.samples
        self._sent = deque(sent.with_packet(None) if sent.plays_s + PACKET_S > content_s else sent for sent in self._sent)
        self._stands_at_s = None
        return again

    def stand(self, now_s: float) -> None:
        """Nobody hears what the listener plays from here on."""
        self._stands_at_s, self._reported_s = self._content(now_s), now_s

    def leave(self, now_s: float) -> None:
        """The listener has gone. It is taken to have heard what it can have heard until its next report was due, so that nothing is said
        twice to who takes its place."""
        if not self._gone:
            until_s = now_s if self._reported_s == float("-inf") else min(now_s, self._reported_s + UNTOLD_S)
            self._stands_at_s, self._gone = self._content(until_s), True

    def played_to(self, rtp_time: int, now_s: float) -> None:
        """A listener that has gone says, now that it is back, which packet it played last."""
        sent = self.find(rtp_time)
        if sent is not None:
            self._stands_at_s, self._reported_s = min(sent.plays_s + PACKET_S, now_s), now_s

    def sent(self, slot: Slot, packet: Packet | None, now_s: float) -> None:
        """`packet`, or silence, leaves in `slot`."""
        self._sent.append(Sent(slot.rtp_time, slot.plays_s, packet, PACKET_S if packet is not None else slot.lasts_s))
        for share in () if packet is None else packet.shares:
            self._count[share.utterance] = self._count.get(share.utterance, 0) + share.samples
        told_s = self._content(min(now_s, self._reported_s)) if self._reported_s > float("-inf") else float("inf")
        kept_s = min(self._content(now_s), told_s) - KEEP_S
        while self._sent[0].plays_s < kept_s or len(self._sent) > MOST_KEPT:
            self._sent.popleft()

    def find(self, rtp_time: int) -> Sent | None:
        """What was sent with this RTP time, or was the last before it; None if that is not remembered."""
        # From the end: a listener names what it got a moment ago.
        return next((sent for sent in reversed(self._sent) if sent.rtp_time <= rtp_time), None)

    @property
    def last_rtp_time(self) -> int | None:
        """Of what was sent last."""
        return self._sent[-1].rtp_time if self._sent else None

    def report(self, content_s: float, standing: bool, now_s: float) -> None:
        """The listener is where one without delay was at `content_s`, and plays on or stands still there."""
        self._delay_s, self._reported_s = now_s - content_s, now_s
        self._stands_at_s = content_s if standing else None
        if not standing:
            self._running_delay_s = self._delay_s

    def expect(self, delay_s: float) -> None:
        """What the listener's delay is taken to be until it says so."""
        self._delay_s = self._running_delay_s = delay_s

    def hurried(self, by_s: float) -> None:
        """What is sent from now on is sent so much earlier (gateway.media.pacer). The listener stays where it is in what it has got, and so
        all of that counts as earlier, too."""
        self._sent = deque(Sent(sent.rtp_time, sent.plays_s - by_s, sent.packet, sent.lasts_s) for sent in self._sent)
        self._delay_s += by_s
        self._running_delay_s += by_s
        if self._stands_at_s is not None:
            self._stands_at_s -= by_s

    def drop(self, doomed: Collection[int], now_s: float) -> None:
        """These utterances are not listened to any more."""
        self._count = {number: self.heard(number, now_s) if number in doomed else count for number, count in self._count.items()}
        self._sent = deque(sent if sent.packet is None else sent.with_packet(sent.packet.without(doomed)) for sent in self._sent)

    def forget(self, utterance: int) -> None:
        """No more questions about `utterance` will come."""
        self._count.pop(utterance, None)

    # What it means

    def spare_s(self, now_s: float) -> float:
        """How long after its time in the schedule a packet still comes in time with a packet to spare, as far as it is known."""
        return min(max(self._delay_s - PACKET_S, 0.0), PACKET_S) if self.measured(now_s) else 0.0

    @property
    def delay_s(self) -> float:
        """How long behind the time at which one without any delay would play it the listener plays what it has, or last
        did before it stood still, as far as it is known."""
        return self._running_delay_s

    def measured(self, now_s: float) -> bool:
        """Whether the listener itself has said where it is, not long ago."""
        return not self._gone and now_s - self._reported_s < STALE_S

    def heard(self, utterance: int, now_s: float) -> int:
        """Samples of `utterance` heard by now."""
        left = 0
        for packet, played in self._unheard(now_s):
            left += sum(max(0, share.samples - played) for share in packet.shares if share.utterance == utterance)
        return self._count.get(utterance, 0) - left

    def playing(self, utterance: int, now_s: float) -> bool:
        """Whether sound of `utterance` is running now."""
        now = self._at(now_s)
        packet = None if now is None else now.packet
        return self._running(now_s) and packet is not None and any(share.utterance == utterance for share in packet.shares)

    def in_speech(self, now_s: float) -> bool:
        """Whether what is to be heard now is speech."""
        now = self._at(now_s)
        return now is not None and now.packet is not None

    def dry(self, now_s: float) -> bool:
        """Whether all speech that was sent has been played."""
        return self.buffered_s(now_s) == 0.0

    def buffered_s(self, now_s: float) -> float:
        """Speech that was sent and not heard yet."""
        return sum(max(0, packet.samples - played) for packet, played in self._unheard(now_s)) / self._rate

    def unplayed_s(self, now_s: float) -> float:
        """The same: what is on its way is there in a moment."""
        return self.buffered_s(now_s)

    def _running(self, now_s: float) -> bool:
        return self._stands_at_s is None or (not self._gone and now_s - self._reported_s >= STALE_S)

    def _content(self, now_s: float) -> float:
        """Where the listener is, as a time of `plays_s`."""
        if self._stands_at_s is None:
            return now_s - self._delay_s
        # Whoever stood still and says nothing any more is taken to play on.
        return self._stands_at_s + (0.0 if self._gone else max(0.0, now_s - self._reported_s - STALE_S))

    def _at(self, now_s: float) -> Sent | None:
        content_s = self._content(now_s)
        under = itertools.takewhile(lambda sent: sent.plays_s + PACKET_S > content_s, reversed(self._sent))
        return next((sent for sent in under if sent.plays_s <= content_s), None)

    def _unheard(self, now_s: float) -> Iterator[tuple[Packet, int]]:
        """What was sent and not heard, packet by packet, and how many samples of each were."""
        content_s = self._content(now_s)
        for sent in reversed(self._sent):
            if sent.plays_s + PACKET_S <= content_s:
                return
            if sent.packet is not None:
                yield sent.packet, max(0, round((content_s - sent.plays_s) * self._rate))
