"""A discrete-event world that drives the real Scheduler with measured stage costs: what a policy would do, without a device.

`python -m engine simulate` compares our policy with three simpler ones under the costs measured on this machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.admission import FULL_FOR_S, Admission, advance
from engine.config import EngineConfig
from engine.messages import SpeechRequest
from engine.playback import PlaybackClock
from engine.request import Utterance
from engine.scheduler import Launch, ReadyWork, Scheduler, Stage, StageCosts

SAMPLE_RATE, FRAME_SAMPLES = 24_000, 1920


@dataclass(frozen=True)
class Arrival:
    """One request: when, how many frames its speech has, and its pace. `token_every_s` is 0 where all text is there at once;
    `trimmed` samples of silence before the first sound never leave; `prefill` pieces of the prompt are not known yet."""

    at_s: float
    frames: int
    pace: str = "live"
    token_every_s: float = 0.0
    trimmed: int = 0
    prefill: int = 0


@dataclass
class Outcome:
    """What one request met. Underruns are gaps in the sound of a listener who starts with the first chunk."""

    arrival: Arrival
    ttfa_s: float | None = None
    underruns: int = 0
    silent_s: float = 0.0
    done_s: float | None = None
    refused: bool = False


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
        """Share of requests with a gap."""
        return sum(o.underruns > 0 for o in self.outcomes) / max(1, len(self.outcomes))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class EarliestDeadline(Scheduler):
    """The stream that runs dry first, newcomers as dry as can be, no matter how far ahead."""

    def _anchor(self, now_s: float, work: list[ReadyWork]) -> ReadyWork | None:
        return min(work, key=lambda item: item.dry_at, default=None)


class FirstCome(Scheduler):
    """The oldest request that can do anything."""

    def _anchor(self, now_s: float, work: list[ReadyWork]) -> ReadyWork | None:
        return min(work, key=lambda item: item.utterance.arrived_s, default=None)


class RoundRobin(Scheduler):
    """Whoever has been served least recently, which is whoever has the fewest frames."""

    def _anchor(self, now_s: float, work: list[ReadyWork]) -> ReadyWork | None:
        return min(work, key=lambda item: item.utterance.frames_issued + item.utterance.frames_decoded, default=None)


POLICIES: dict[str, type[Scheduler]] = {
    "vivavoce": Scheduler,
    "earliest deadline": EarliestDeadline,
    "round-robin": RoundRobin,
    "first come": FirstCome,
}


class Durations:
    """What launches really take in a simulated world: here, what the scheduler expects."""

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs

    def launch_s(self, launch: Launch, now_s: float) -> float:
        """One that begins at `now_s`."""
        return self._costs.estimate(launch.stage, len(launch.rows), launch.frames)

    def open_s(self) -> float:
        """To put one utterance into its slot while the engine is at work."""
        return 0.0

    def wire_s(self) -> float:
        """From client to engine at work, or back."""
        return 0.0

    def wake_s(self, rest_s: float, now_s: float, opens: bool) -> float:
        """From the end of a rest of `rest_s`, by a newcomer's sending (`opens`) or the engine's own clock, to the first launch."""
        return 0.0


def simulate(
    policy: type[Scheduler], config: EngineConfig, costs: StageCosts, arrivals: Sequence[Arrival], durations: Durations | None = None
) -> Run:
    """Play `arrivals` through a scheduler of class `policy` that expects `costs`, and through admission, as EngineLoop does."""
    durations = durations or Durations(costs)
    scheduler = policy(config, costs, SAMPLE_RATE, FRAME_SAMPLES)
    admission = Admission(scheduler)
    coming = sorted(((a, Outcome(a)) for a in arrivals), key=lambda pair: pair[0].at_s)
    waiting: list[tuple[Utterance, Outcome]] = []
    active: list[tuple[Utterance, Outcome]] = []
    run = Run([outcome for _, outcome in coming], 0.0, 0.0)
    now_s = 0.0
    rests_from_s: float | None = 0.0
    while coming or waiting or active:
        entered = len(active)
        while coming and coming[0][0].at_s + (durations.wire_s() if rests_from_s is None else 0.0) <= now_s:
            arrival, outcome = coming.pop(0)
            request = SpeechRequest(pace=arrival.pace)
            u = Utterance(b"", len(active), request, PlaybackClock(SAMPLE_RATE), arrival.frames, arrival.at_s, prefill_left=arrival.prefill)
            waiting.append((u, outcome))
        for u, outcome in sorted(waiting, key=lambda pair: not pair[0].live):
            if admission.has_slot(config.slots - len(active), u) and admission.has_room(now_s, [other for other, _ in active], u):
                waiting.remove((u, outcome))
                active.append((u, outcome))
                now_s += durations.open_s() if rests_from_s is None else 0.0
            elif now_s - u.arrived_s >= config.longest_wait_s:
                waiting.remove((u, outcome))
                outcome.refused = True
        for u, outcome in active:
            _give_text(u, outcome.arrival, now_s)
        launch = scheduler.pick(now_s, [u for u, _ in active])
        if launch is None:
            rests_from_s = now_s if rests_from_s is None else rests_from_s
            now_s = _next_event(scheduler, now_s, coming, waiting, active)
            continue
        if rests_from_s is not None:
            now_s += durations.wake_s(now_s - rests_from_s, now_s, len(active) > entered)
            rests_from_s = None
        cost_s = durations.launch_s(launch, now_s)
        now_s += cost_s
        run.busy_s += cost_s
        run.launches.setdefault(launch.stage, []).append(len(launch.rows))
        outcomes = {id(u): outcome for u, outcome in active}
        for u in launch.rows:
            _retire(u, outcomes[id(u)], launch.stage, launch.frames, now_s, durations)
        active = [(u, outcome) for u, outcome in active if not u.complete]
    run.ended_s = now_s
    return run


def _give_text(u: Utterance, arrival: Arrival, now_s: float) -> None:
    if u.text_closed:
        return
    if arrival.token_every_s == 0.0:
        u.text_closed = True
    else:
        u.work = None
        u.text_issued = min(arrival.frames, 1 + int((now_s - arrival.at_s) / arrival.token_every_s))
        u.text_closed = u.text_issued == arrival.frames


def _next_event(
    scheduler: Scheduler,
    now_s: float,
    coming: list[tuple[Arrival, Outcome]],
    waiting: list[tuple[Utterance, Outcome]],
    active: list[tuple[Utterance, Outcome]],
) -> float:
    times = [coming[0][0].at_s] if coming else []
    wake_s = scheduler.wake_in(now_s, [u for u, _ in active])
    times += [] if wake_s is None else [now_s + wake_s]
    times += [now_s + outcome.arrival.token_every_s for u, outcome in active if u.stalled]
    times += [now_s + FULL_FOR_S] if waiting else []
    return max(now_s + 0.0005, min(times))


def _retire(u: Utterance, outcome: Outcome, stage: Stage, frames: int, now_s: float, durations: Durations) -> None:
    sounded = u.has_sounded
    if stage is Stage.CODEC and sounded and u.live and (late_s := now_s - u.playback.dry_at(now_s)) > 0:
        outcome.underruns += 1
        outcome.silent_s += late_s
    advance(u, stage, frames, FRAME_SAMPLES, now_s, outcome.arrival.trimmed)
    if u.has_sounded and not sounded:
        outcome.ttfa_s = now_s + durations.wire_s() - outcome.arrival.at_s
    if u.complete:
        outcome.done_s = now_s


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
        "| requests/s | policy | TTFA p50 ms | TTFA p95 ms | requests with a gap | silence ms a request | refused | device busy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rate in rates:
        for name, policy in POLICIES.items():
            run = simulate(policy, config, costs, poisson(rate, seconds, seed=1))
            silent_s = sum(o.silent_s for o in run.outcomes) / max(1, len(run.outcomes))
            lines.append(
                f"| {rate:g} | {name} | {run.ttfa_s(0.5) * 1000:.0f} | {run.ttfa_s(0.95) * 1000:.0f} | {run.underrun_share:.1%} "
                f"| {silent_s * 1000:.0f} | {sum(o.refused for o in run.outcomes)} | {run.busy_s / run.ended_s:.0%} |"
            )
    return "\n".join(lines)
