"""How long things really take, drawn from what an engine process has done: durations for the simulator.

An engine that has rested is slow at first: its clock, its caches and its pages have gone cold, and the first launch may take seven times as
long as the same one a moment later. And a shared machine has slow moments, which last longer than a launch. So launches are not drawn one
by one: a simulated spell of work takes the course of a real one that began after about as long a rest."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.flight import TraceEntry
from engine.scheduler import Launch, Stage, StageCosts
from engine.simulate import Durations

# A gap between two launches that is longer was a rest.
REST_S = 0.002
# So long after a rest launches take what they usually take.
WARM_S = 0.05
# A spell is drawn from so many, those after the most similar rests.
ALIKE = 15


@dataclass
class Record:
    """One engine process's launches, and its clients' stamps by utterance number."""

    trace: list[TraceEntry]
    stamps: dict[int, Stamp]


@dataclass(frozen=True)
class Stamp:
    """What a client saw of one utterance, in this machine's monotonic seconds: when it sent it, when its first sound came."""

    sent_s: float
    heard_s: float


@dataclass
class Spell:
    """Launches one after another behind a rest of `rest_s`. `intake_s`: from a newcomer's sending to the first launch, its way
    through the wire, the waking and the opening; None where the engine woke by its own clock. `pace`: by stage, offsets in seconds from
    the first launch, and how many times the usual each launch took."""

    rest_s: float
    begins_s: float
    intake_s: float | None = None
    ends_s: float = 0.0
    pace: dict[Stage, tuple[list[float], list[float]]] = field(default_factory=lambda: defaultdict(lambda: ([], [])))

    @property
    def length_s(self) -> float:
        return self.ends_s - self.begins_s


class Measured(Durations):
    """Durations from what engine processes did; `costs` has the means, for launches that never were."""

    def __init__(self, records: Sequence[Record], costs: StageCosts, seed: int = 1) -> None:
        super().__init__(costs)
        self._rng = random.Random(seed)
        self._hosts = [entry.host_s for record in records for entry in record.trace if not entry.opened]
        usual_s = statistics.median(self._hosts)
        self._opens = [max(0.0, entry.host_s - usual_s) / entry.opened for record in records for entry in _opened_at_work(record.trace)]
        self._ways = [way_s for record in records for way_s in _ways_back(record)]
        spells = [spell for record in records for spell in _spells(record)]
        self._usual = _usual(spells, costs)
        self._spells = [_paced(entries, spell, self._usual, costs) for entries, spell in spells]
        self._now, self._from_s = self._spells[0], 0.0

    def launch_s(self, launch: Launch, now_s: float) -> float:
        key = launch.stage, self._costs.bucket(len(launch.rows)), launch.frames
        usual_s = self._usual.get(key) or super().launch_s(launch, now_s)
        if now_s - self._from_s > self._now.length_s:
            self._go_on(now_s)
        pace = self._now.pace.get(launch.stage)
        factor = pace[1][max(0, bisect_right(pace[0], now_s - self._from_s) - 1)] if pace else 1.0
        return usual_s * factor + self._rng.choice(self._hosts)

    def open_s(self) -> float:
        return self._rng.choice(self._opens) if self._opens else 0.0

    def wire_s(self) -> float:
        return self._rng.choice(self._ways)

    def wake_s(self, rest_s: float, now_s: float, opens: bool) -> float:
        kind = [spell for spell in self._spells if (spell.intake_s is not None) == opens] or self._spells
        kind.sort(key=lambda spell: abs(math.log((spell.rest_s + 1e-3) / (rest_s + 1e-3))))
        self._now = self._rng.choice(kind[:ALIKE])
        intake_s = self._now.intake_s or 0.0
        self._from_s = now_s + intake_s
        return intake_s

    def _go_on(self, now_s: float) -> None:
        """The drawn spell was shorter than the simulated one: go on with another at the same distance from its rest, or, where none was
        so long, in the middle of a long one."""
        past_s = now_s - self._from_s
        longer = [spell for spell in self._spells if spell.length_s > past_s]
        if len(longer) >= ALIKE:
            self._now = self._rng.choice(longer)
        else:
            self._now = self._rng.choice(sorted(self._spells, key=lambda spell: -spell.length_s)[:ALIKE])
            self._from_s = now_s - self._rng.uniform(min(WARM_S, self._now.length_s / 2), self._now.length_s / 2)


def _rested(before: TraceEntry, entry: TraceEntry) -> bool:
    return entry.starts_s - entry.host_s - before.ends_s > REST_S


def _opened_at_work(trace: Sequence[TraceEntry]) -> list[TraceEntry]:
    return [entry for before, entry in pairwise(trace) if entry.opened and not _rested(before, entry)]


def _spells(record: Record) -> list[tuple[list[TraceEntry], Spell]]:
    stamps = record.stamps
    spells: list[tuple[list[TraceEntry], Spell]] = []
    for before, entry in pairwise(record.trace):
        if _rested(before, entry):
            spell = Spell(entry.starts_s - entry.host_s - before.ends_s, entry.starts_s)
            new = [stamps[number].sent_s for number in entry.rows if number in stamps and stamps[number].sent_s > before.ends_s]
            if entry.opened and new:
                spell.intake_s = entry.starts_s - min(new)
            spells.append(([], spell))
        if spells:
            spells[-1][0].append(entry)
            spells[-1][1].ends_s = entry.ends_s
    return spells


def _usual(spells: Sequence[tuple[list[TraceEntry], Spell]], costs: StageCosts) -> dict[tuple[Stage, int, int], float]:
    """Seconds of a launch of each kind that was seen, once the engine is warm."""
    taken: dict[tuple[Stage, int, int], list[float]] = defaultdict(list)
    for entries, spell in spells:
        for entry in entries:
            if entry.starts_s - spell.begins_s > WARM_S:
                taken[entry.stage, costs.bucket(len(entry.rows)), entry.frames].append(entry.ends_s - entry.starts_s)
    return {key: statistics.median(seconds) for key, seconds in taken.items()}


def _paced(entries: Sequence[TraceEntry], spell: Spell, usual: dict[tuple[Stage, int, int], float], costs: StageCosts) -> Spell:
    for entry in entries:
        usual_s = usual.get((entry.stage, costs.bucket(len(entry.rows)), entry.frames))
        if usual_s is not None:
            offsets, factors = spell.pace[entry.stage]
            offsets.append(entry.starts_s - spell.begins_s)
            factors.append((entry.ends_s - entry.starts_s) / usual_s)
    return spell


def _ways_back(record: Record) -> list[float]:
    """Seconds from the end of the launch that made a first sound to its client, who may have it before the engine has ended the launch."""
    decoded: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for entry in record.trace:
        if entry.stage is Stage.CODEC:
            for number in entry.rows:
                decoded[number].append((entry.starts_s, entry.ends_s))
    ways = []
    for number, stamp in record.stamps.items():
        made = bisect_right(decoded[number], (stamp.heard_s, 0.0))
        if made:
            ways.append(max(0.0, stamp.heard_s - decoded[number][made - 1][1]))
    return ways
