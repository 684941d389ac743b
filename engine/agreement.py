"""Does the simulator tell the truth? The same requests, at the same moments, to an engine process on this machine and to the simulator.

`python -m engine simulate --check` first has the engine speak at several loads, and takes from its trace what launches and the host cost
here; from these costs alone the simulator then foretells runs it has not seen, at other loads."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import Overloaded
from engine.loop import TraceEntry
from engine.messages import AudioChunk, Sampling, SpeechRequest
from engine.playback import PlaybackClock
from engine.scheduler import Launch, Scheduler, Stage, StageCosts
from engine.simulate import FRAME_SAMPLES, SAMPLE_RATE, Arrival, Durations, Outcome, Run, poisson, simulate

TEXTS = (
    "Good morning.",
    "Your table is ready now.",
    "I have found three trains that leave after nine.",
    "The next one goes from platform four, and you have to change once on the way.",
    "Thank you for calling, and please stay on the line while I look for your order in our books.",
)
COST_RATES = (0.5, 1.5, 2.5, 4.0)
COST_S = 40.0
"""Requests a second, one rate after the other for so long: the launches from which costs are taken."""


@dataclass
class Met:
    """What an engine process made of some arrivals: each client's outcome, with its true frames and trimmed samples, and the trace."""

    outcomes: list[Outcome]
    trace: list[TraceEntry]


class Measured(Durations):
    """Durations as they were in a trace: one of those of the same stage, bucket and frames, at random."""

    def __init__(self, trace: Sequence[TraceEntry], costs: StageCosts, seed: int = 1) -> None:
        super().__init__(costs)
        self._rng = random.Random(seed)
        self._launches: dict[tuple[Stage, int, int], list[float]] = defaultdict(list)
        for entry in trace:
            self._launches[entry.stage, costs.bucket(len(entry.rows)), entry.frames].append(entry.ends_s - entry.starts_s)
        self._hosts = [entry.host_s for entry in trace if not entry.opened]
        usual_s = statistics.median(self._hosts)
        self._opens = [max(0.0, entry.host_s - usual_s) / entry.opened for entry in trace if entry.opened]

    def launch_s(self, launch: Launch) -> float:
        seen = self._launches.get((launch.stage, self._costs.bucket(len(launch.rows)), launch.frames))
        return (self._rng.choice(seen) if seen else super().launch_s(launch)) + self._rng.choice(self._hosts)

    def open_s(self) -> float:
        return self._rng.choice(self._opens)


def check(model: str | Path, config: EngineConfig, rates: Sequence[float], seconds: float = 120.0) -> str:
    """A table, as Markdown, of what was foretold and what was met at each rate. `config` is the profile "latency", which the engine
    process takes."""
    loads = [poisson(rate, COST_S, seed=number) for number, rate in enumerate(COST_RATES)]
    met = _meet(model, [Arrival(COST_S * number + arrival.at_s, 0) for number, load in enumerate(loads) for arrival in load])
    costs = StageCosts(config.buckets, mean_over=1_000_000)
    kinds: dict[tuple[Stage, int, int], list[float]] = defaultdict(list)
    for entry in met.trace:
        kinds[entry.stage, costs.bucket(len(entry.rows)), entry.frames].append(entry.ends_s - entry.starts_s)
    for (stage, rows, frames), taken_s in kinds.items():
        costs.record(stage, rows, frames, statistics.fmean(taken_s))
    durations = Measured(met.trace, costs)
    lines = [
        f"costs from {len(met.trace)} launches of {len(met.outcomes)} utterances at {', '.join(map(str, COST_RATES))} requests a second",
        "",
        "| requests/s | requests | device busy | TTFA p50 ms, met | foretold | TTFA p95 ms, met | foretold | error "
        "| with a gap, met | foretold | refused, met | foretold |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in rates:
        met = _meet(model, poisson(rate, seconds, seed=round(rate * 100)))
        foretold = simulate(Scheduler, config, costs, [outcome.arrival for outcome in met.outcomes], durations)
        lines.append(_row(rate, met, foretold))
    return "\n".join(lines)


def _row(rate: float, met: Met, foretold: Run) -> str:
    busy_s = sum(entry.ends_s - entry.starts_s + entry.host_s for entry in met.trace)
    share = busy_s / (met.trace[-1].ends_s - met.trace[0].starts_s)
    real = Run(met.outcomes, busy_s, 0.0)
    p50, p95 = ([run.ttfa_s(q) * 1000 for run in (real, foretold)] for q in (0.5, 0.95))
    refused = [sum(outcome.refused for outcome in run.outcomes) for run in (real, foretold)]
    cells = [
        f"{rate:g}",
        str(len(met.outcomes)),
        f"{share:.0%}",
        *(f"{value:.0f}" for value in (*p50, *p95)),
        f"{p95[1] / p95[0] - 1:+.0%}",
        *(f"{run.underrun_share:.1%}" for run in (real, foretold)),
        *(str(count) for count in refused),
    ]
    return "| " + " | ".join(cells) + " |"


def _meet(model: str | Path, arrivals: Sequence[Arrival]) -> Met:
    """Send each arrival's request to a fresh engine process; which text it has is drawn, how long its speech is shows then."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint, trace = f"ipc://{folder}/engine", Path(folder) / "trace"
        command = [sys.executable, "-m", "engine", "serve", "--endpoint", endpoint, "--model", str(model), "--trace", str(trace)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as engine:
            try:
                said = asyncio.run(_speak(endpoint, arrivals))
            finally:
                engine.terminate()
        rows = [json.loads(line) for line in trace.read_text().splitlines()]
    entries = [TraceEntry(**{**row, "stage": Stage[row["stage"]], "rows": tuple(row["rows"])}) for row in rows]
    frames: dict[int, int] = defaultdict(int)
    for entry in entries:
        if entry.stage is Stage.CODEC:
            for number in entry.rows:
                frames[number] += entry.frames
    for number, samples, outcome in said:
        made = frames.get(number, 40)  # one that was refused has none; as many as most have
        trimmed = max(0, made * FRAME_SAMPLES - samples) if number in frames else 0
        outcome.arrival = replace(outcome.arrival, frames=made, trimmed=trimmed)
    return Met([outcome for _, _, outcome in said], entries)


async def _speak(endpoint: str, arrivals: Sequence[Arrival]) -> list[tuple[int, int, Outcome]]:
    """Each request's utterance number, samples and outcome, in order of arrival."""
    rng = random.Random(len(arrivals))
    async with EngineClient(endpoint) as client:
        begun_s = time.monotonic() + 0.5

        async def say(at_s: float, text: str, seed: int) -> tuple[int, int, Outcome]:
            await asyncio.sleep(begun_s + at_s - time.monotonic())
            opened_s = time.monotonic()
            utterance = client.open(SpeechRequest(sampling=Sampling(seed=seed)))
            utterance.append(text)
            utterance.finish()
            outcome = Outcome(Arrival(opened_s - begun_s, 0))
            playback, samples = PlaybackClock(SAMPLE_RATE), 0
            try:
                async for event in utterance:
                    if not isinstance(event, AudioChunk):
                        continue
                    now_s = time.monotonic()
                    if outcome.ttfa_s is None:
                        outcome.ttfa_s = now_s - opened_s
                    elif (late_s := now_s - playback.dry_at(now_s)) > 0:
                        outcome.underruns += 1
                        outcome.silent_s += late_s
                    samples += len(event.pcm) // 2
                    playback.emit(len(event.pcm) // 2, now_s)
            except Overloaded:
                outcome.refused = True
            return utterance.number, samples, outcome

        return await asyncio.gather(*(say(arrival.at_s, rng.choice(TEXTS), seed) for seed, arrival in enumerate(arrivals)))
