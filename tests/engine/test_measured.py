"""Durations drawn from a trace: rests are found, and a simulated spell takes the course of a measured one."""

from __future__ import annotations

import pytest

from engine.config import LATENCY
from engine.flight import TraceEntry
from engine.measured import Measured, Record, Stamp
from engine.messages import SpeechRequest
from engine.playback import PlaybackClock
from engine.request import Utterance
from engine.scheduler import Launch, Scheduler, Stage, StageCosts
from engine.simulate import Arrival, simulate

COLD = 5
"""Launches after a rest that take 8 ms instead of 2."""


def record() -> Record:
    """An utterance a second: sent 4 ms before its first launch, 50 frames of 2 ms a launch and 0.1 ms of host between, heard 1 ms after."""
    trace, stamps = [], {}
    for number in range(1, 20):
        now_s = float(number)
        sent_s = now_s - 0.004
        for launch in range(150):
            stage = (Stage.TALKER, Stage.PREDICTOR, Stage.CODEC)[launch % 3]
            ends_s = now_s + (0.008 if launch < COLD else 0.002)
            trace.append(TraceEntry(now_s, ends_s, stage, (number,), 1, 1, 0.0 if launch == 0 else 0.0001, int(launch == 0)))
            if launch == 2:
                stamps[number] = Stamp(sent_s, ends_s + 0.001)
            now_s = ends_s + 0.0001
    return Record(trace, stamps)


def measured() -> Measured:
    costs = StageCosts(LATENCY.buckets)
    for stage in (Stage.TALKER, Stage.PREDICTOR, Stage.CODEC):
        costs.record(stage, 1, 1, 0.002)
    return Measured([record()], costs)


def test_the_first_launches_after_a_rest_are_slow_as_they_were() -> None:
    durations = measured()
    launch = Launch(Stage.TALKER, [Utterance(b"", 1, SpeechRequest(), PlaybackClock(24_000), 10, 0.0)], 1)
    assert durations.wake_s(0.6, 100.0, True) == pytest.approx(0.004)
    assert durations.launch_s(launch, 100.004) == pytest.approx(0.008, abs=2e-4)
    assert durations.launch_s(launch, 100.104) == pytest.approx(0.002, abs=2e-4)
    # Longer than any spell that was measured: as warm as those were in their middle.
    assert durations.launch_s(launch, 109.0) == pytest.approx(0.002, abs=2e-4)


def test_a_world_of_measured_durations_is_as_fast_as_the_one_they_come_from() -> None:
    costs = StageCosts(LATENCY.buckets)
    for stage in (Stage.TALKER, Stage.PREDICTOR, Stage.CODEC):
        costs.record(stage, 1, 1, 0.002)
    run = simulate(Scheduler, LATENCY, costs, [Arrival(float(at), 10) for at in range(10)], measured())
    # The way there, three cold launches with the host between, the way back.
    assert run.ttfa_s(0.5) == pytest.approx(0.004 + 3 * 0.008 + 0.0003 + 0.001, abs=1e-3)
