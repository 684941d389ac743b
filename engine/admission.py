"""May one more utterance begin? Not by a count but by a forecast: nobody who is being listened to may run dry for it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from engine.request import Utterance
from engine.scheduler import Scheduler, Stage

FORECAST_S = 1.0
# Enough for a second of the CPUs and small batches that admission has to think about; a faster device is forecast less far.
FORECAST_LAUNCHES = 150
# And so many rows are looked at, all launches of a forecast together: about ten milliseconds of the host. Where that is too few launches
# to see anything, it is asked instead whether anybody is late now.
FORECAST_ROWS = 6_000
FEWEST_LAUNCHES = 15
# Estimates are no truer than this.
FORECAST_GRACE_S = 0.02
# A forecast that found no room stands for this long.
FULL_FOR_S = 0.05
# A device needed less than this for good has room for one more, and a forecast would only cost the host time.
LIGHT_LOAD = 0.5
# Slots that downloads leave to live requests, as a share.
RESERVED = 0.25


class Admission:
    """Asked by EngineLoop, and by the simulator, for each utterance that is ready to begin."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._full_until_s = float("-inf")
        slots = scheduler.config.slots
        self._reserved = min(math.ceil(RESERVED * slots), slots - 1)

    def has_slot(self, free: int, newcomer: Utterance) -> bool:
        """Whether one of `free` slots is for `newcomer`: a download leaves some to those who listen."""
        return free > (0 if newcomer.live else self._reserved)

    def is_light(self, streams: int) -> bool:
        """Whether so many could be kept at half the device's speed: then there is no need to ask more."""
        return self._scheduler.load(streams) <= LIGHT_LOAD

    def has_room(self, now_s: float, active: Sequence[Utterance], newcomer: Utterance) -> bool:
        """Whether `newcomer` can join the `active` ones. A download waits for spare time by itself."""
        if not active or not newcomer.live:
            return True
        if now_s < self._full_until_s:
            return False
        # Buffers can hide for seconds that there are too many, so what can be kept for good counts as well as the next second.
        load = self._scheduler.load(1 + sum(u.live and not u.speech_ended for u in active))
        if load <= LIGHT_LOAD:
            return True
        if FEWEST_LAUNCHES * len(active) > FORECAST_ROWS:
            full = load > 1.0 or any(_late(u, now_s) for u in active if u.live and not u.stalled)
        else:
            full = load > 1.0 or would_miss(self._scheduler, now_s, active, newcomer)
        if full:
            self._full_until_s = now_s + FULL_FOR_S
        return not full


def would_miss(scheduler: Scheduler, now_s: float, admitted: Sequence[Utterance], newcomer: Utterance) -> bool:
    """Whether, in the next second, a listener of one of the `admitted` would run dry if `newcomer` joined. The costs are the
    scheduler's own; all text is taken to be there, and nobody to end. Nothing that is passed in changes.

    A download has no listener yet, and who waits for text already runs dry for want of that, whoever joins."""
    forecast = copy.copy(scheduler)
    rows: list[Utterance] = []
    heard: set[Utterance] = set()
    for u in (*admitted, newcomer):
        twin = copy.copy(u)
        twin.playback = copy.copy(u.playback)
        twin.text_closed, twin.max_frames, twin.samples_consumed, twin.work = True, u.max_frames + 10_000, 10**12, None
        rows.append(twin)
        if u.live and not u.stalled:
            heard.add(twin)
    time_s, end_s = now_s, now_s + FORECAST_S
    for _ in range(min(FORECAST_LAUNCHES, 1 + FORECAST_ROWS // len(rows))):
        launch = forecast.pick(time_s, rows)
        if launch is None:
            wake_s = forecast.wake_in(time_s, rows)
            time_s = end_s if wake_s is None else time_s + max(0.005, wake_s)
        else:
            time_s += forecast.costs.estimate(launch.stage, len(launch.rows), launch.frames)
            for u in launch.rows:
                if launch.stage is Stage.CODEC and u in heard and _late(u, time_s):
                    return True
                advance(u, launch.stage, launch.frames, forecast.samples_per_frame, time_s)
        if time_s >= end_s:
            break
    return any(_late(u, time_s) for u in heard)


def _late(u: Utterance, now_s: float) -> bool:
    return u.has_sounded and now_s - u.playback.dry_at(now_s) > FORECAST_GRACE_S


def advance(u: Utterance, stage: Stage, frames: int, samples_per_frame: int, now_s: float, trimmed: int = 0) -> None:
    """What a launch does to one of its rows, as EngineLoop would; the first `trimmed` samples of the utterance never leave."""
    u.work = None
    match stage:
        case Stage.PREFILL:
            u.prefill_left -= 1
        case Stage.TALKER:
            u.frames_issued += 1
        case Stage.PREDICTOR:
            u.frames_done += 1
            u.speech_ended = u.frames_done == u.max_frames
        case Stage.CODEC:
            u.frames_decoded += frames
            fresh = max(0, u.frames_decoded * samples_per_frame - trimmed - u.samples_emitted)
            u.samples_emitted += fresh
            u.samples_consumed = max(u.samples_consumed, u.samples_emitted)
            if fresh:
                u.playback.emit(fresh, now_s)
