"""What choosing the next launch costs the host, on a device as fast as a large GPU: part of `python -m engine bench`.

A world of streams that all speak and are listened to, driven by the real Scheduler; only its calls are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from engine.admission import advance
from engine.config import BALANCED, EngineConfig
from engine.messages import SpeechRequest
from engine.playback import PlaybackClock
from engine.request import Utterance
from engine.resting import Resting
from engine.scheduler import Scheduler, Stage, StageCosts

SAMPLE_RATE, FRAME_SAMPLES = 24_000, 1920
STREAMS = (1, 50, 200, 800)
TURNS = 300
# Until the streams stand at stages and buffers of their own.
SETTLED = 300
CONFIG = replace(BALANCED, buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256))


def fast_costs(config: EngineConfig) -> StageCosts:
    """Launches of 1 to 4 ms, in which a further row costs little."""
    costs = StageCosts(config.buckets)
    for rows in config.buckets:
        costs.record(Stage.TALKER, rows, 1, 0.0012 + 0.000005 * rows)
        costs.record(Stage.PREDICTOR, rows, 1, 0.0018 + 0.000005 * rows)
        for frames in config.chunk_frames:
            costs.record(Stage.CODEC, rows, frames, 0.0006 + 0.000012 * rows * frames)
    return costs


def turn_s(streams: int, turns: int = TURNS, pick: type[Scheduler] = Scheduler) -> list[float]:
    """Seconds of thread time that each of `turns` launches took to be chosen, a look at each row for stalled text included."""
    costs = fast_costs(CONFIG)
    scheduler = pick(replace(CONFIG, slots=streams), costs, SAMPLE_RATE, FRAME_SAMPLES)
    rows = [Utterance(b"", n, SpeechRequest(), PlaybackClock(SAMPLE_RATE), 1_000_000, 0.001 * n) for n in range(streams)]
    for u in rows:
        u.text_issued, u.text_closed, u.samples_consumed = 1_000_000, u.number % 2 == 0, 10**12
    resting = Resting(CONFIG.ahead_s)
    for u in rows:
        resting.join(u)
    now_s = 0.0
    taken: list[float] = []
    while len(taken) < SETTLED + turns:
        begin_s = time.thread_time()
        stalled = [u for u in rows if not u.text_closed and u.stalled]
        awake = resting.awake(now_s)
        launch = scheduler.pick(now_s, awake, streams)
        resting.settle(now_s, awake)
        if launch is None:
            wakes_s = [scheduler.wake_in(now_s, awake, streams), resting.wakes_in(now_s)]
        taken.append(time.thread_time() - begin_s)
        assert not stalled
        if launch is None:
            now_s += max(0.001, min(seconds for seconds in wakes_s if seconds is not None))
            continue
        now_s += costs.estimate(launch.stage, len(launch.rows), launch.frames)
        for u in launch.rows:
            advance(u, launch.stage, launch.frames, FRAME_SAMPLES, now_s)
    return taken[SETTLED:]


def run(show: Callable[[str], None] = print) -> None:
    """Show the microseconds a turn at several numbers of streams."""
    show(f"scheduler: microseconds of processor time to choose a launch, {TURNS} launches")
    show(f"{'streams':>7} {'median':>8} {'p95':>8}")
    for streams in STREAMS:
        taken = sorted(turn_s(streams))
        show(f"{streams:7} {statistics.median(taken) * 1e6:8.0f} {taken[int(0.95 * len(taken))] * 1e6:8.0f}")
