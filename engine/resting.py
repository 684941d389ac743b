"""Resting: who the scheduler need not look at. Most of hundreds of listeners have seconds in hand, or wait for something to happen."""

from __future__ import annotations

import heapq
import itertools
import math

from engine.request import Utterance


class Resting:
    """Utterances are awake until the scheduler has found (`Utterance.work`) that nothing can be done for them, or that they are more than
    `ahead_s` ahead; then they rest until that may no longer be so, or something changes about them."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
        self._awake: dict[Utterance, None] = {}
        self._until_s: dict[Utterance, float] = {}
        self._alarms: list[tuple[float, int, Utterance]] = []
        self._count = itertools.count()

    def join(self, u: Utterance) -> None:
        """A new one."""
        self._awake[u] = None

    def leave(self, u: Utterance) -> None:
        """One that has ended."""
        self._until_s.pop(u, None)
        self._awake.pop(u, None)

    def changed(self, u: Utterance) -> None:
        """What was found about this one holds no longer."""
        u.work = None
        if self._until_s.pop(u, None) is not None:
            self._awake[u] = None

    def awake(self, now_s: float) -> list[Utterance]:
        """Who is to be looked at now."""
        while self._alarms and self._alarms[0][0] <= now_s:
            until_s, _, u = heapq.heappop(self._alarms)
            if self._until_s.get(u) == until_s:
                del self._until_s[u]
                self._awake[u] = None
        return list(self._awake)

    def settle(self, now_s: float, seen: list[Utterance]) -> None:
        """The scheduler has looked at those who were `seen`, all of them awake."""
        far_s = now_s + self.ahead_s
        for u in seen:
            work = u.work
            if work is None or (work.stage is not None and (work.due_s < far_s or not u.live)):
                continue
            until_s = work.until_s if work.stage is None else min(work.until_s, work.due_s - self.ahead_s)
            # One whose time runs with the clock is looked at each turn.
            if until_s > now_s:
                del self._awake[u]
                self._until_s[u] = until_s
                if until_s != math.inf:
                    heapq.heappush(self._alarms, (until_s, next(self._count), u))

    def wakes_in(self, now_s: float) -> float | None:
        """Seconds until the next of them wakes by itself; None if none does."""
        while self._alarms and self._until_s.get(self._alarms[0][2]) != self._alarms[0][0]:
            heapq.heappop(self._alarms)
        return max(0.0, self._alarms[0][0] - now_s) if self._alarms else None
