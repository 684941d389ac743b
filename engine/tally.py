"""Tally: what the engine has done since its start, for whoever watches it. Pure: counts and sums, nothing kept per launch."""

from __future__ import annotations

import bisect
from collections import Counter

from engine.messages import StageCost, StageStats, Stats
from engine.scheduler import Stage, StageCosts

SLACK_BOUNDS_S = (-1.0, -0.5, -0.2, -0.1, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0)


class Tally:
    """Counts from an engine's start on; a new engine begins at zero."""

    def __init__(self) -> None:
        self._sizes: dict[Stage, Counter[int]] = {stage: Counter() for stage in Stage}
        self._seconds = dict.fromkeys(Stage, 0.0)
        self._host_s = 0.0
        self._slacks = [0] * (len(SLACK_BOUNDS_S) + 1)
        self._slack_s = 0.0

    def launched(self, stage: Stage, rows: int, seconds: float, host_s: float) -> None:
        """A launch of `rows` rows took `seconds`, and the engine's thread `host_s` to come to it and to make it."""
        self._host_s += host_s
        self._sizes[stage][rows] += 1
        self._seconds[stage] += seconds

    def chunk_ready(self, slack_s: float) -> None:
        """A listener's next chunk was made `slack_s` before it would have run dry; negative: after."""
        self._slacks[bisect.bisect_left(SLACK_BOUNDS_S, slack_s)] += 1
        self._slack_s += slack_s

    def stats(self, epoch: int, slots: int, used: int, waiting: int, costs: StageCosts) -> Stats:
        """All of it as a message."""
        stages = [StageStats(stage.name.lower(), dict(self._sizes[stage]), self._seconds[stage]) for stage in Stage]
        known = [StageCost(stage.name.lower(), rows, frames, seconds) for stage, rows, frames, seconds in costs.known()]
        return Stats(epoch, slots, used, waiting, stages, known, list(SLACK_BOUNDS_S), list(self._slacks), self._slack_s, self._host_s)
