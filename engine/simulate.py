"""A discrete-event world that drives the real Scheduler with measured stage costs: what a policy would do, without a device.

`python -m engine simulate` compares our policy with three simpler ones under the costs measured on this machine."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.messages import SpeechRequest
from engine.playback import PlaybackClock
from engine.request import Utterance
from engine.scheduler import ReadyWork, Scheduler, Stage, StageCosts

SAMPLE_RATE, FRAME_SAMPLES = 24_000, 1920
FORECAST_S = 1.0
# Enough for a second of the CPUs and small batches that admission has to think about; a faster device is forecast less far.
FORECAST_LAUNCHES = 150
# Estimates are no truer than this.
FORECAST_GRACE_S = 0.02


@dataclass(frozen=True)
class Arrival:
    """One request: when, how many frames its speech has, and its pace. `token_every_s` is 0 where all text is there at once."""

    at_s: float
    frames: int
    pace: str = "live"
    token_every_s: float = 0.0


@dataclass
class Outcome:
    """What one request met. Underruns are gaps in the sound of a listener who starts with the first chunk."""

    arrival: Arrival
    ttfa_s: float | None = None
    underruns: int = 0
    silent_s: float = 0.0
    done_s: float | None = None


@dataclass
class Run:
    """A simulated world's outcomes, and how busy its device was."""

    outcomes: list[Outcome]
    busy_s: float
    ended_s: float
    launches: dict[Stage, list[int]] = field(default_factory=dict)

    def ttfa_s(self, share: float) -> float:
        """A percentile of the time to first audio."""
        return percentile([o.ttfa_s for o in self.outcomes if o.ttfa_s is not None], share)

    @property
    def underrun_share(self) -> float:
        """Requests with a gap."""
        return sum(o.underruns > 0 for o in self.outcomes) / max(1, len(self.outcomes))


def would_miss(scheduler: Scheduler, now_s: float, admitted: Sequence[Utterance], newcomer: Utterance) -> bool:
    """Whether, in the next second, a listener of one of the `admitted` would run dry if `newcomer` joined. The costs are the
    scheduler's own; all text is taken to be there, and nobody to end. Nothing that is passed in changes."""
    forecast = copy.copy(scheduler)
    rows = []
    for u in (*admitted, newcomer):
        twin = copy.copy(u)
        twin.playback = copy.copy(u.playback)
        twin.text_closed, twin.max_frames, twin.samples_consumed = True, u.max_frames + 10_000, 10**12
        rows.append(twin)
    time_s, end_s = now_s, now_s + FORECAST_S
    for _ in range(FORECAST_LAUNCHES):
        launch = forecast.pick(time_s, rows)
        if launch is None:
            wake_s = forecast.wake_in(time_s, rows)
            time_s = end_s if wake_s is None else time_s + max(0.005, wake_s)
        else:
            time_s += forecast.costs.estimate(launch.stage, len(launch.rows), launch.frames)
            for u in launch.rows:
                if launch.stage is Stage.CODEC and u.has_sounded and time_s - u.playback.dry_at(time_s) > FORECAST_GRACE_S:
                    return True
                _advance(u, launch.stage, launch.frames, time_s)
        if time_s >= end_s:
            break
    return any(u.has_sounded and u.live and time_s - u.playback.dry_at(time_s) > FORECAST_GRACE_S for u in rows)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class EarliestDeadline(Scheduler):
    """The stream that runs dry first, newcomers as dry as can be, no matter how far ahead."""

    def _anchor(self, work: list[ReadyWork]) -> ReadyWork | None:
        return min(work, key=lambda item: item.dry_at, default=None)


class FirstCome(Scheduler):
    """The oldest request that can do anything."""

    def _anchor(self, work: list[ReadyWork]) -> ReadyWork | None:
        return min(work, key=lambda item: item.utterance.arrived_s, default=None)


class RoundRobin(Scheduler):
    """Whoever has been served least recently, which is whoever has the fewest frames."""

    def _anchor(self, work: list[ReadyWork]) -> ReadyWork | None:
        return min(work, key=lambda item: item.utterance.frames_issued + item.utterance.frames_decoded, default=None)


POLICIES: dict[str, type[Scheduler]] = {
    "vivavoce": Scheduler,
    "earliest deadline": EarliestDeadline,
    "round-robin": RoundRobin,
    "first come": FirstCome,
}


def simulate(policy: type[Scheduler], config: EngineConfig, costs: StageCosts, arrivals: Sequence[Arrival], overhead_s: float = 0.0) -> Run:
    """Play `arrivals` through a scheduler of class `policy`; a launch takes what `costs` estimate plus `overhead_s` of host time."""
    scheduler = policy(config, costs, SAMPLE_RATE, FRAME_SAMPLES)
    waiting = sorted(((a, Outcome(a)) for a in arrivals), key=lambda pair: pair[0].at_s)
    active: list[tuple[Utterance, Outcome]] = []
    run = Run([outcome for _, outcome in waiting], 0.0, 0.0)
    now_s = 0.0
    number = 0
    while waiting or active:
        while waiting and waiting[0][0].at_s <= now_s and len(active) < config.slots:
            arrival, outcome = waiting.pop(0)
            number += 1
            u = Utterance(b"", number, SpeechRequest(pace=arrival.pace), PlaybackClock(SAMPLE_RATE), arrival.frames, arrival.at_s)
            active.append((u, outcome))
        for u, outcome in active:
            _give_text(u, outcome.arrival, now_s)
        rows = [u for u, _ in active]
        launch = scheduler.pick(now_s, rows)
        if launch is None:
            now_s = _next_event(scheduler, now_s, waiting, active, config)
            continue
        cost_s = costs.estimate(launch.stage, len(launch.rows), launch.frames) + overhead_s
        now_s += cost_s
        run.busy_s += cost_s
        run.launches.setdefault(launch.stage, []).append(len(launch.rows))
        outcomes = {id(u): outcome for u, outcome in active}
        for u in launch.rows:
            _retire(u, outcomes[id(u)], launch.stage, launch.frames, now_s)
        active = [(u, outcome) for u, outcome in active if not u.complete]
    run.ended_s = now_s
    return run


def _give_text(u: Utterance, arrival: Arrival, now_s: float) -> None:
    if arrival.token_every_s == 0.0:
        u.text_closed = True
    else:
        u.text_issued = min(arrival.frames, 1 + int((now_s - arrival.at_s) / arrival.token_every_s))
        u.text_closed = u.text_issued == arrival.frames


def _next_event(
    scheduler: Scheduler, now_s: float, waiting: list[tuple[Arrival, Outcome]], active: list[tuple[Utterance, Outcome]], config: EngineConfig
) -> float:
    times = [waiting[0][0].at_s] if waiting and len(active) < config.slots else []
    wake_s = scheduler.wake_in(now_s, [u for u, _ in active])
    times += [] if wake_s is None else [now_s + wake_s]
    times += [now_s + outcome.arrival.token_every_s for u, outcome in active if u.stalled]
    return max(now_s + 0.0005, min(times))


def _retire(u: Utterance, outcome: Outcome, stage: Stage, frames: int, now_s: float) -> None:
    if stage is Stage.CODEC:
        if not u.has_sounded:
            outcome.ttfa_s = now_s - outcome.arrival.at_s
        elif u.live and (late_s := now_s - u.playback.dry_at(now_s)) > 0:
            outcome.underruns += 1
            outcome.silent_s += late_s
    _advance(u, stage, frames, now_s)
    if u.complete:
        outcome.done_s = now_s


def _advance(u: Utterance, stage: Stage, frames: int, now_s: float) -> None:
    """What a launch does to one of its rows, as EngineLoop would."""
    match stage:
        case Stage.TALKER:
            u.frames_issued += 1
        case Stage.PREDICTOR:
            u.frames_done += 1
            u.speech_ended = u.frames_done == u.max_frames
        case Stage.CODEC:
            u.frames_decoded += frames
            u.samples_emitted += frames * FRAME_SAMPLES
            u.samples_consumed = max(u.samples_consumed, u.samples_emitted)
            u.playback.emit(frames * FRAME_SAMPLES, now_s)


def poisson(rate: float, seconds: float, seed: int, *, files: float = 0.0) -> list[Arrival]:
    """Requests at `rate` a second for `seconds`, 1 to 6 s of speech each; a share `files` of them are downloads."""
    rng = random.Random(seed)
    arrivals, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at_s, rng.randint(12, 75), "file" if rng.random() < files else "live"))
    return arrivals


def compare(config: EngineConfig, costs: StageCosts, rates: Sequence[float], seconds: float = 120.0) -> str:
    """A table of every policy at every rate, as Markdown."""
    lines = [
        "| requests/s | policy | TTFA p50 ms | TTFA p95 ms | requests with a gap | silence ms a request | device busy |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate in rates:
        for name, policy in POLICIES.items():
            run = simulate(policy, config, costs, poisson(rate, seconds, seed=1))
            silent_s = sum(o.silent_s for o in run.outcomes) / max(1, len(run.outcomes))
            lines.append(
                f"| {rate:g} | {name} | {run.ttfa_s(0.5) * 1000:.0f} | {run.ttfa_s(0.95) * 1000:.0f} | {run.underrun_share:.1%} "
                f"| {silent_s * 1000:.0f} | {run.busy_s / run.ended_s:.0%} |"
            )
    return "\n".join(lines)
