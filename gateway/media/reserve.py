"""Reserve: how much sound a listener is to hold. In silence next to nothing, so that the next word is heard at once; in speech enough to ride
out a stall. Pure; times are monotonic seconds.

A browser that is sent comfort noise has no buffer: it plays the first packet of speech as soon as that one's RTP time has come, and half of
what it was told to hold is there. From then on it plays between its jitterBufferTarget and a packet more behind the promptest packet of the last
two seconds, and leaves sound alone in there. So when speech begins as much is sent at once as it lacks (gateway.media.track), and it is told to hold
what it then has. Behind speech it plays as far behind as in speech until those two seconds are over: told to hold little before that, it would hurry
through a word that comes then. Its own estimate of the network may make it hold more at any time."""

from __future__ import annotations

import math
from collections.abc import Callable

from gateway.media.network import Network
from gateway.media.pacer import PACKET_S

MOST_MORE_S = 0.06
"""As much less than in speech it is told to hold in silence at most: an engine has made it by the time that speech begins."""
FADES_S = 0.3
"""After speech has been heard to its end, as far as that is known, before silence becomes comfort noise."""
PASSES_S = 3.0
"""The same, before it is told to hold little where silence is sent like sound: it passes over silence then, and may lose a period of a word that
comes while it does (seen once in 80)."""
FRESH_S = 2.0
"""After a report older than this a listener is served as if it did not report."""
STEP_S = 0.005
"""Less is not worth telling."""
BAND_S = 0.012
"""It may be told to hold so much less than it does without passing over anything."""
SOON_S = 0.012
"""A browser that holds nothing plays a packet so long after it was sent: it looks every 10 ms."""
STARTS_S = 0.8
"""From its first packet on, until a browser has an estimate of its network. It looks at that every half second."""
START_HOLDS_S = 0.085
"""As much it is to have in speech before that: it then wants to hold 80 ms whatever it was told, and would stretch speech until it does."""
START_SOON_S = 0.006
"""It plays its first packet about so long after that was sent."""
COLD_S = 2.5
"""For so long its first report is waited for."""
REPORTS_AFTER_S = 0.1
"""It has played for about so long when it first reports."""
CHUNK_S = 0.08
"""What an engine makes at once at the least."""


class Reserve:
    """One listener's, from its first report to its last. `speech_s` is what it was told to hold when it connected; without a listener that
    does as it is told, that is how it stays. `tell` is called with what it is to hold from now on."""

    def __init__(self, quiet_s: float, speech_s: float, tell: Callable[[float], None], *, can_hold: bool = False) -> None:
        self.speech_s = speech_s
        self._quiet_s = min(max(quiet_s, round(speech_s - MOST_MORE_S, 6)), speech_s)
        self.new = can_hold and self.least_s == 0.0 and self._quiet_s < speech_s
        """It has been sent no sound yet, silence included: it plays what comes first without a buffer."""
        self._came_s: float | None = None
        """When it was sent its first packet."""
        self._tell = tell
        self._told_s = speech_s
        self._heeds = False
        """It has done as it was told, once."""
        self._network = Network(speech_s)
        self._depth_s = 0.0
        self._comfort = False
        """Silence is sent as comfort noise."""
        self._steady = False
        """Its last two reports of that agree: in a stall they would not."""
        self._reported_s = self._sounded_s = float("-inf")

    @property
    def awaited(self) -> bool:
        """Whether it is yet to say that it hears what is played: an output that has slept may play nothing for a second or more, and what has come by
        then is hurried through."""
        return self.new and self._reported_s == float("-inf")

    @property
    def least_s(self) -> float:
        """How long a packet that leaves in silence is to wait there: a packet less than it is told to hold."""
        return max(self._quiet_s - 0.02, 0.0)

    @property
    def less_prompt_s(self) -> float:
        """How much less prompt than others a packet may be made in silence."""
        return self._network.less_prompt_s

    def report(self, target_s: float | None, depth_s: float, network_s: float | None, sounding: bool, now_s: float) -> None:
        """The listener's word for what it was told to hold, how long what it played lately had waited there (0: it played nothing), and how long
        it would have for the network's sake; `sounding`: there is speech that it has not heard yet."""
        if self.awaited:
            # Its receiver's clock has stood still as long as its output.
            self._came_s = now_s - REPORTS_AFTER_S
        self._network.report(network_s)
        as_told = target_s is not None and abs(target_s - self._told_s) < STEP_S / 2
        self._steady = depth_s > 0.0 and abs(depth_s - self._depth_s) <= BAND_S
        self._depth_s, self._reported_s = depth_s, now_s
        self._heeds |= as_told and self._told_s == self._quiet_s < self.speech_s
        if sounding:
            self._sounded_s = now_s
            if as_told:
                self._raise(depth_s)
        elif (self.new or not self._comfort) and now_s - self._sounded_s >= PASSES_S:
            self._lower(self._quiet_s)

    def quiet(self, holds_s: float, now_s: float) -> bool:
        """Whether silence is to be sent as comfort noise. `holds_s`: how far behind the promptest packet that it remembers it plays."""
        self.new = self.new and self._stays_new(now_s)
        fresh = now_s - self._reported_s < FRESH_S
        self._comfort = self.new or (self._heeds and self.less_prompt_s > 0.0 and self._faded(now_s) and fresh)
        if self._comfort and not self.new:
            self._lower(holds_s - BAND_S)
        return self._comfort

    def begin(self, depth_s: float | None, now_s: float) -> float:
        """Speech begins: how much more than before is to be sent ahead. `depth_s`: how long a packet of the comfort noise waited; None: there was
        none, and all that is known is what was reported."""
        self._sounded_s, self.new, self._comfort = now_s, False, False
        if depth_s is not None:
            if self._starts(now_s):
                return max(max(self.speech_s, START_HOLDS_S) - depth_s, 0.0)
            return max(self.speech_s - max(depth_s, SOON_S), 0.0)
        if not self._heeds or self._told_s == self.speech_s:
            return 0.0
        # It may be passing over silence just now, and is to be done with that before the first word is played.
        self._raise(self._depth_s - BAND_S)
        return max(self.speech_s - self._depth_s, 0.0) if self._steady and now_s - self._reported_s < FRESH_S else 0.0

    def first_waits_s(self, queued_s: float, now_s: float) -> float:
        """How long the first packet of speech is to wait at the listener at least, with so much of it at hand: what is sent with it and it are
        then together what it is to have."""
        return START_HOLDS_S - max(queued_s, CHUNK_S) + PACKET_S if self._starts(now_s) else float("-inf")

    def _starts(self, now_s: float) -> bool:
        """Whether it has no estimate of its network yet."""
        return self._came_s is not None and now_s - self._came_s < STARTS_S

    def _stays_new(self, now_s: float) -> bool:
        if self._came_s is None:
            self._came_s = now_s
        silent = self._reported_s == float("-inf")
        fresh = now_s - self._came_s < COLD_S if silent else now_s - self._reported_s < FRESH_S
        return fresh and (self._starts(now_s) or (self._network.bearable and (self._heeds or silent)))

    def _faded(self, now_s: float) -> bool:
        return now_s - self._sounded_s >= FADES_S

    def _lower(self, to_s: float) -> None:
        """Tell it to hold less, in silence."""
        wanted_s = max(self._quiet_s, math.floor(to_s * 1000) / 1000)
        if self._told_s - wanted_s >= min(STEP_S, self._told_s - self._quiet_s) > 0.0:
            self._told_s = wanted_s
            self._tell(wanted_s)

    def _raise(self, to_s: float) -> None:
        """Tell it to hold more, but never more than it does: it would stretch speech until it did. Nor ever less in speech: it would hurry."""
        wanted_s = min(self.speech_s, math.floor(to_s * 1000) / 1000)
        if wanted_s >= self._told_s + STEP_S:
            self._told_s = wanted_s
            self._tell(wanted_s)
