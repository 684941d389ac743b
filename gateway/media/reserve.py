"""Reserve: how much sound a listener is to hold. In silence next to nothing, so that the next word is soon heard; in speech enough to ride
out a stall. Pure; times are monotonic seconds.

A browser plays between its jitterBufferTarget and a packet more behind the promptest packet of the last two seconds, and leaves sound alone
in there. So when speech begins as much more is sent at once as it lacks, and it is told to hold what it then has; behind the speech it is told to
hold little again, and passes over silence, 40 ms of it a second, until it does. Its own estimate of the network may make it hold more at any time."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST_MORE_S = 0.06
"""So much is sent at once at most when speech begins: an engine has made it by then."""
FADES_S = 3.0
"""After speech has been heard to its end, as far as that is known, before the listener may pass over anything. A word that comes while it does
may lose a period of its beginning (seen once in 80), and in mid-conversation one soon comes."""
STEADY_S = 0.012
"""Depths of two reports that lie no further apart are those of a receiver that passes over silence at most. One that has more or less than
that in its next report has not been understood."""
FRESH_S = 0.5
"""A report older than this says nothing of what the listener holds now."""
STEP_S = 0.005
"""Less is not worth telling."""
CALM_S = 0.003
"""And of one that passes over nothing any more."""
BAND_S = 0.02
"""By itself it then holds as much more than it was told, and no less."""
MOST_LATE_S = 0.014
"""Silence may be sent so late: a packet that comes 20 ms late, with what the way adds, makes a browser hold 20 ms more by itself."""
MOST_EASED_S = 0.01
MEMORY_S = 2.1
"""For so long a browser remembers the promptest packet."""
MOST_HELD_BACK_S = 0.01
LEAST_DEPTH_S = 0.01
"""What a listener keeps while a packet of silence is held back for a word that is on its way."""


class Reserve:
    """One listener's, from its first report to its last. `speech_s` is what it was told to hold when it connected; without a listener that
    does as it is told, that is how it stays. `tell` is called with what it is to hold from now on."""

    def __init__(self, quiet_s: float, speech_s: float, tell: Callable[[float], None]) -> None:
        self._speech_s = speech_s
        self._quiet_s = min(max(quiet_s, round(speech_s - MOST_MORE_S, 6)), speech_s)
        self._tell = tell
        self._told_s = speech_s
        self._depth_s = 0.0
        self._as_told = self._steady = self._calm = False
        self._network_calm = False
        """It does not hold more by itself, as one does where packets come late."""
        self._eased_s: float | None = None
        """When less was sent ahead in this silence."""
        self._reported_s = self._sounded_s = float("-inf")

    def report(self, target_s: float | None, depth_s: float, sounding: bool, now_s: float) -> None:
        """The listener's word for what it was told to hold and how long what it played lately had waited there (0: it played nothing);
        `sounding`: there is speech that it has not heard yet."""
        as_told = target_s is not None and abs(target_s - self._told_s) < STEP_S / 2 and depth_s > 0.0
        self._steady = as_told and self._as_told and abs(depth_s - self._depth_s) <= STEADY_S
        self._calm = self._steady and abs(depth_s - self._depth_s) <= CALM_S
        self._as_told, self._depth_s, self._reported_s = as_told, depth_s, now_s
        if self._calm and self._told_s == self._quiet_s:
            self._network_calm = depth_s <= self._told_s + BAND_S + STEP_S
        if sounding:
            self._sounded_s = now_s
            if as_told:
                self._raise(depth_s)
        elif now_s - self._sounded_s >= FADES_S and self._told_s > self._quiet_s:
            self._told_s = self._quiet_s
            self._tell(self._told_s)

    def begin(self, now_s: float) -> float:
        """Speech begins: how much more than before is to be sent ahead. 0 where it is not known what the listener holds."""
        lacks_s = 0.0
        if self._fresh(now_s) and self._told_s == self._quiet_s < self._speech_s:
            if self._steady:
                lacks_s = min(max(self._speech_s - self._depth_s, 0.0), MOST_MORE_S)
            # It may be passing over silence just now, and is to be done with that before the first word is played.
            self._raise(self._depth_s - STEADY_S)
        self._sounded_s, self._eased_s = now_s, None
        return lacks_s

    def ease(self, now_s: float) -> float:
        """In silence: how much less than before is to be sent ahead, so that the listener holds what it was told, and not what it allows itself
        beyond."""
        over_s = self._depth_s - self._quiet_s
        if not (self._calm and self._fresh(now_s) and self._told_s == self._quiet_s < self._speech_s and self._eased_s is None):
            return 0.0
        if not STEP_S <= over_s <= BAND_S:
            return 0.0
        less_s = min(over_s, MOST_EASED_S)
        self._eased_s, self._depth_s, self._calm = now_s, self._depth_s - less_s, False
        return less_s

    def patience_s(self, now_s: float) -> float:
        """How long a packet of silence may be held back where the first of speech may come instead."""
        if not self._fresh(now_s) or not self._network_calm:
            return 0.0
        late_s = MOST_EASED_S if self._eased_s is not None and now_s - self._eased_s < MEMORY_S else 0.0
        return min(max(self._depth_s - LEAST_DEPTH_S, 0.0), MOST_HELD_BACK_S, MOST_LATE_S - late_s)

    def _raise(self, to_s: float) -> None:
        """Tell it to hold more, but never more than it does: it would stretch speech until it did. Nor ever less in speech: it would hurry."""
        wanted_s = min(self._speech_s, math.floor(to_s * 1000) / 1000)
        if wanted_s >= self._told_s + STEP_S:
            self._told_s = wanted_s
            self._tell(wanted_s)

    def _fresh(self, now_s: float) -> bool:
        return now_s - self._reported_s < FRESH_S
