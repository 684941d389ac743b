"""Does the simulator tell the truth? The same requests, at the same moments, to an engine process on this machine and to the simulator.

`python -m engine simulate --check` first has the engine speak at several loads, and takes from its trace what launches and the host cost
here, and from that and the clients' stamps how long wire and waking take; from these alone the simulator then foretells runs it has not
seen, at other loads. All is done in short turns: a shared machine is not the same from one minute to the next."""

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
from engine.flight import TraceEntry
from engine.measured import Measured, Record, Stamp
from engine.messages import AudioChunk, Sampling, SpeechRequest
from engine.playback import PlaybackClock
from engine.scheduler import Scheduler, Stage, StageCosts
from engine.simulate import FRAME_SAMPLES, SAMPLE_RATE, Arrival, Outcome, Run, poisson, simulate

TEXTS = (
    "Good morning.",
    "Your table is ready now.",
    "I have found three trains that leave after nine.",
    "The next one goes from platform four, and you have to change once on the way.",
    "Thank you for calling, and please stay on the line while I look for your order in our books.",
)
COST_RATES = (0.5, 1.5, 2.5, 4.0)
COST_S = 5.0
"""Requests a second, one rate after the other for so long: the launches from which costs are taken."""
ROUNDS = 5
REQUESTS = 20
"""So many a rate and round."""
SEEDS = 5
"""Simulations of each run, all outcomes counted together."""


@dataclass
class Met:
    """What an engine process made of some arrivals: each client's outcome, with its true frames and trimmed samples, and the record."""

    outcomes: list[Outcome]
    record: Record


def check(model: str | Path, config: EngineConfig, rates: Sequence[float]) -> str:
    """A table, as Markdown, of what was foretold and what was met at each rate. `config` is the profile "latency", which the engine
    process takes."""
    measured: list[Met] = []
    met: dict[float, list[Met]] = {rate: [] for rate in rates}
    for number in range(ROUNDS):
        loads = [poisson(rate, COST_S, seed=10 * number + step) for step, rate in enumerate(COST_RATES)]
        measured.append(_meet(model, [Arrival(COST_S * step + arrival.at_s, 0) for step, load in enumerate(loads) for arrival in load]))
        for rate in rates:
            met[rate].append(_meet(model, poisson(rate, REQUESTS / rate, seed=round(rate * 100) + number)))
    return table(config, measured, met)


def table(config: EngineConfig, measured: Sequence[Met], met: dict[float, list[Met]]) -> str:
    """Foretell each of the runs in `met` from what was `measured`."""
    records = [run.record for run in measured]
    costs = _costs(config, records)
    lines = [
        f"costs from {sum(len(record.trace) for record in records)} launches of {sum(len(run.outcomes) for run in measured)} utterances at "
        f"{', '.join(map(str, COST_RATES))} requests a second",
        "",
        "| requests/s | requests | device busy | TTFA p50 ms, met | foretold | p95 ms, each run | p95 ms, met | foretold | error "
        "| with a gap, met | foretold | refused, met | foretold |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate, runs in met.items():
        foretold: list[Outcome] = []
        for run in runs:
            for seed in range(SEEDS):
                durations = Measured(records, costs, seed)
                foretold += simulate(Scheduler, config, costs, [outcome.arrival for outcome in run.outcomes], durations).outcomes
        lines.append(_row(rate, runs, Run(foretold, 0.0, 0.0)))
    return "\n".join(lines)


def _costs(config: EngineConfig, records: Sequence[Record]) -> StageCosts:
    """The mean of each kind of launch, which is what a scheduler comes to expect."""
    costs = StageCosts(config.buckets)
    kinds: dict[tuple[Stage, int, int], list[float]] = defaultdict(list)
    for entry in (entry for record in records for entry in record.trace):
        kinds[entry.stage, costs.bucket(len(entry.rows)), entry.frames].append(entry.ends_s - entry.starts_s)
    for (stage, rows, frames), taken_s in kinds.items():
        costs.record(stage, rows, frames, statistics.fmean(taken_s))
    return costs


def _row(rate: float, runs: Sequence[Met], foretold: Run) -> str:
    traces = [run.record.trace for run in runs]
    busy_s = sum(entry.ends_s - entry.starts_s + entry.host_s for trace in traces for entry in trace)
    share = busy_s / sum(trace[-1].ends_s - trace[0].starts_s for trace in traces)
    real = Run([outcome for run in runs for outcome in run.outcomes], busy_s, 0.0)
    p50, p95 = ([run.ttfa_s(q) * 1000 for run in (real, foretold)] for q in (0.5, 0.95))
    cells = [
        f"{rate:g}",
        str(len(real.outcomes)),
        f"{share:.0%}",
        *(f"{value:.0f}" for value in p50),
        ", ".join(f"{Run(run.outcomes, 0.0, 0.0).ttfa_s(0.95) * 1000:.0f}" for run in runs),
        *(f"{value:.0f}" for value in p95),
        f"{p95[1] / p95[0] - 1:+.0%}",
        *(f"{run.underrun_share:.1%}" for run in (real, foretold)),
        *(f"{sum(outcome.refused for outcome in run.outcomes) / len(run.outcomes):.1%}" for run in (real, foretold)),
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
    stamps = {}
    for number, samples, sent_s, outcome in said:
        if outcome.ttfa_s is not None:
            stamps[number] = Stamp(sent_s, sent_s + outcome.ttfa_s)
        made = frames.get(number, 40)  # one that was refused has none; as many as most have
        trimmed = max(0, made * FRAME_SAMPLES - samples) if number in frames else 0
        outcome.arrival = replace(outcome.arrival, frames=made, trimmed=trimmed)
    return Met([outcome for *_, outcome in said], Record(entries, stamps))


async def _speak(endpoint: str, arrivals: Sequence[Arrival]) -> list[tuple[int, int, float, Outcome]]:
    """Each request's utterance number, samples, moment of sending and outcome, in order of arrival."""
    rng = random.Random(len(arrivals))
    async with EngineClient(endpoint) as client:
        begun_s = time.monotonic() + 0.5

        async def say(at_s: float, text: str, seed: int) -> tuple[int, int, float, Outcome]:
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
            return utterance.number, samples, opened_s, outcome

        return await asyncio.gather(*(say(arrival.at_s, rng.choice(TEXTS), seed) for seed, arrival in enumerate(arrivals)))
