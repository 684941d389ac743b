"""Flight: a launch from its making until its results are taken, and what is kept of it for whoever looks later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.opening import Voice
from engine.scheduler import Launch, Stage
from engine.stages.base import Launched


@dataclass(eq=False)
class Flight:
    """A launch under way: its voices as they were, and for each row the number of its token or first frame."""

    launch: Launch
    voices: list[Voice]
    first: list[int]
    pending: Launched
    silent: int
    starts_s: float
    called_s: float
    """How long the call took that made it."""
    host_s: float
    opened: int

    def entry(self, seconds: float) -> TraceEntry:
        """For the trace, once it is known how long it took."""
        rows = tuple(u.number for u in self.launch.rows)
        ends_s = self.starts_s + seconds
        return TraceEntry(self.starts_s, ends_s, self.launch.stage, rows, self.launch.frames, self.silent, self.host_s, self.opened)


class TraceEntry(NamedTuple):
    """One launch; `silent` of its rows had not sounded yet. Rows are utterance numbers. Before it the host took `host_s` since the
    launch before or since it woke, and opened `opened` utterances."""

    starts_s: float
    ends_s: float
    stage: Stage
    rows: tuple[int, ...]
    frames: int
    silent: int
    host_s: float
    opened: int
