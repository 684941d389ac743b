"""Scheduler.pick: the three rules, who joins, and worlds in which nobody starves."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from engine import resting
from engine import scheduler as scheduler_module
from engine.config import LATENCY
from engine.messages import SpeechRequest
from engine.playback import PlaybackClock
from engine.request import Utterance
from engine.scheduler import Launch, Scheduler, Stage, StageCosts
from engine.turns import turn_s
from tests.engine.effort import lines

RATE, FRAME = 24_000, 1920
CONFIG = replace(LATENCY, buckets=(1, 2, 4, 8), first_frames=1, chunk_frames=(1, 2, 4))
COST_S = {Stage.TALKER: 0.004, Stage.PREDICTOR: 0.006, Stage.CODEC: 0.005}


def scheduler() -> Scheduler:
    costs = StageCosts(CONFIG.buckets)
    for stage, seconds in COST_S.items():
        for rows in CONFIG.buckets:
            costs.record(stage, rows, 1, seconds * (0.7 + 0.3 * rows))
    return Scheduler(CONFIG, costs, RATE, FRAME)


def utterance(
    number: int, *, arrived_s: float = 0.0, issued: int = 0, done: int = 0, decoded: int = 0, dry_s: float | None = None, pace: str = "live"
) -> Utterance:
    """An utterance whose text is all there; `dry_s` is when its listener runs dry, from time 100 on."""
    playback = PlaybackClock(RATE)
    u = Utterance(b"", number, SpeechRequest(pace=pace), playback, 500, arrived_s)
    u.slot, u.text_closed = number, True
    u.frames_issued, u.frames_done, u.frames_decoded, u.samples_emitted = issued, done, decoded, decoded * FRAME
    if decoded:
        playback.emit(decoded * FRAME, 100.0)
        left_s = (dry_s if dry_s is not None else 101.0) - 100.0
        playback.report(decoded * FRAME - int(left_s * RATE), True, True, 100.0)
    return u


def pick(*utterances: Utterance) -> Launch | None:
    return scheduler().pick(100.0, utterances)


def test_the_earliest_to_run_dry_goes_before_newcomers() -> None:
    late = utterance(1, issued=50, done=50, decoded=50, dry_s=100.005)
    later = utterance(2, issued=50, done=50, decoded=50, dry_s=100.001)
    launch = pick(utterance(3), late, later)
    assert launch is not None and launch.rows[0] is later


def test_a_newcomer_goes_before_streams_with_slack_the_oldest_first() -> None:
    fine = utterance(1, issued=50, done=50, decoded=50, dry_s=101.0)
    launch = pick(fine, utterance(2, arrived_s=9.0), utterance(3, arrived_s=8.0))
    assert launch is not None and launch.rows[0].number == 3 and launch.stage is Stage.TALKER


def test_the_anchor_works_at_the_stage_nearest_to_sound() -> None:
    launch = pick(utterance(1, issued=1, done=1))
    assert launch is not None and (launch.stage, launch.frames) == (Stage.CODEC, 1)
    launch = pick(utterance(1, issued=1, done=0))
    assert launch is not None and launch.stage is Stage.PREDICTOR


def test_nobody_is_served_who_is_far_enough_ahead() -> None:
    far = utterance(1, issued=60, done=60, decoded=60, dry_s=104.0)
    assert pick(far) is None
    wake_s = scheduler().wake_in(100.0, [far])
    assert wake_s is not None and 0.5 < wake_s < 1.0


def test_a_long_prompt_gives_way_to_a_listener_about_to_run_dry() -> None:
    newcomer = utterance(3)
    newcomer.prefill_left = 40
    launch = pick(newcomer, utterance(1, issued=50, done=50, decoded=50, dry_s=101.0))
    assert launch is not None and launch.stage is Stage.PREFILL and launch.rows == [newcomer]
    late = utterance(2, issued=50, done=50, decoded=50, dry_s=100.005)
    launch = pick(newcomer, late)
    assert launch is not None and launch.stage is Stage.TALKER and launch.rows == [late]


def test_a_download_fills_spare_time_only() -> None:
    file = utterance(1, issued=20, done=20, decoded=20, pace="file")
    live = utterance(2, issued=50, done=50, decoded=50, dry_s=100.5)
    launch = pick(file, live)
    assert launch is not None and launch.rows[0] is live
    far = utterance(3, issued=60, done=60, decoded=60, dry_s=104.0)
    launch = pick(file, far)
    assert launch is not None and launch.rows == [file]


def test_rows_ready_for_the_same_work_join_in_order_of_need() -> None:
    rows = [utterance(n, issued=50, done=50, decoded=50, dry_s=100.3 + 0.1 * n) for n in range(1, 5)]
    launch = pick(*reversed(rows))
    assert launch is not None
    assert [u.number for u in launch.rows] == [1, 2, 3, 4]


def test_a_row_without_text_waits_and_its_finished_frames_are_still_decoded() -> None:
    stalled = utterance(1, issued=3, done=3, decoded=2, dry_s=100.1)
    stalled.text_closed, stalled.text_issued = False, 3
    launch = pick(stalled)
    assert launch is not None and (launch.stage, launch.frames) == (Stage.CODEC, 1)
    stalled.frames_decoded, stalled.work = 3, None
    assert pick(stalled) is None


def test_credit_stops_the_codec() -> None:
    u = utterance(1, issued=900, done=900, decoded=800, pace="file")
    u.speech_ended = True
    assert pick(u) is None
    u.samples_consumed, u.work = 700 * FRAME, None
    launch = pick(u)
    assert launch is not None and launch.stage is Stage.CODEC


def test_swapping_the_listeners_reports_swaps_the_launch_order() -> None:
    """Two streams equal in every figure of the server: only what their listeners say differs."""

    def order(first_heard: int, second_heard: int) -> list[int]:
        streams = [utterance(n, issued=50, done=50, decoded=50, dry_s=101.0) for n in (1, 2)]
        for stream, heard in zip(streams, (first_heard, second_heard), strict=True):
            stream.playback.report(heard, True, True, 100.0)
        launch = pick(*streams)
        assert launch is not None
        return [u.number for u in launch.rows]

    assert order(40 * FRAME, 30 * FRAME) == [1, 2]
    assert order(30 * FRAME, 40 * FRAME) == [2, 1]


def test_a_slow_codec_gets_chunks_it_can_sustain() -> None:
    """30 ms a frame of Talker and Predictor, 45 ms a codec launch of any size: one frame at a time falls behind, two do not."""
    sched = scheduler()
    for _ in range(200):
        sched.costs.record(Stage.TALKER, 1, 1, 0.010)
        sched.costs.record(Stage.PREDICTOR, 1, 1, 0.020)
        for frames in CONFIG.chunk_frames:
            sched.costs.record(Stage.CODEC, 1, frames, 0.045)
    assert sched.least_chunk() == 2
    newcomer = utterance(1, issued=1, done=1)
    launch = sched.pick(100.0, [newcomer])
    assert launch is not None and launch.stage is Stage.TALKER
    newcomer.frames_issued = newcomer.frames_done = 2
    newcomer.work = None
    launch = sched.pick(100.0, [newcomer])
    assert launch is not None and (launch.stage, launch.frames) == (Stage.CODEC, 2)


@pytest.mark.parametrize(("streams", "most"), [(50, 3_100), (800, 24_500)])
def test_choosing_a_launch_costs_a_fast_device_little(streams: int, most: int) -> None:
    """A launch takes a GPU 1 to 4 ms. What choosing takes in seconds, `python -m engine bench` says; here its lines of Python are counted, those
    of a hundred launches of streams that have settled: a third more than they are."""
    settled, further = (lines(partial(turn_s, streams, turns), scheduler_module, resting) for turns in (0, 100))
    assert (further - settled) / 100 < most


def test_a_bucket_half_full_of_padding_is_not_taken_where_it_costs_more_than_a_second_launch() -> None:
    streams = [utterance(n, issued=50, done=50, decoded=50, dry_s=101.0) for n in range(1, 6)]
    for eight_s, rows in ((0.016, 4), (0.011, 5)):
        sched = scheduler()
        for size, seconds in ((1, 0.003), (2, 0.005), (4, 0.010), (8, eight_s)):
            sched.costs = StageCosts(CONFIG.buckets) if size == 1 else sched.costs
            sched.costs.record(Stage.TALKER, size, 1, seconds)
        launch = sched.pick(100.0, streams)
        assert launch is not None and len(launch.rows) == rows


def crowd(count: int) -> list[Utterance]:
    """Live listeners with a second in hand each, all of whose frames are made and wait for the codec."""
    return [utterance(n, issued=60, done=60, decoded=50, dry_s=101.0 + 0.001 * n) for n in range(count)]


def test_of_a_crowd_somebody_who_is_listened_to_goes_before_newcomers_ahead_of_time() -> None:
    """Of hundreds there is always a newcomer: whoever waited for a moment without one would be served too late."""
    for others, first in ((2, 1000), (40, 1001)):
        newcomer, nearly = utterance(1000), utterance(1001, issued=60, done=60, decoded=50, dry_s=100.14)
        launch = pick(*crowd(others), newcomer, nearly)
        assert launch is not None and launch.rows[0].number == first


def test_a_crowd_is_decoded_in_chunks_that_leave_the_device_time_for_the_rest() -> None:
    sched = scheduler()
    late = [utterance(n, issued=60, done=60, decoded=50, dry_s=100.0) for n in range(60)]
    for streams, frames in ((8, 1), (60, 4)):
        launch = sched.pick(100.0 + streams, late[:streams])
        assert launch is not None and (launch.stage, launch.frames) == (Stage.CODEC, frames)


def test_what_a_launch_takes_the_host_is_part_of_the_load() -> None:
    sched = scheduler()
    device = sched.load(8)
    assert 0.0 < device < 1.0
    sched.host_s = 0.05
    assert sched.load(8) > 1.0


def test_who_is_late_takes_company_at_a_little_of_its_time_and_a_newcomer_at_less() -> None:
    costs = StageCosts(CONFIG.buckets)
    for stage in (Stage.TALKER, Stage.PREDICTOR, Stage.CODEC):
        for rows, seconds in ((1, 0.001), (2, 0.0015), (4, 0.002), (8, 0.0038)):
            costs.record(stage, rows, 1, seconds)
    for dry_s, rows in ((99.9, 8), (None, 4)):
        first = utterance(0, issued=50, done=50, decoded=50, dry_s=dry_s) if dry_s is not None else utterance(0)
        launch = Scheduler(CONFIG, costs, RATE, FRAME).pick(100.0, [first, *(utterance(n, arrived_s=1.0) for n in range(1, 8))])
        assert launch is not None and launch.stage is Stage.TALKER and launch.rows[0] is first and len(launch.rows) == rows


def calm_scheduler() -> Scheduler:
    calm = scheduler()
    calm.config = replace(CONFIG, calm_s=0.3)
    return calm


def listened(number: int, slack_s: float) -> Utterance:
    return utterance(number, issued=50, done=50, decoded=50, dry_s=100.0 + slack_s)


def test_in_a_calm_newcomers_go_without_company() -> None:
    new, newer, fine, short = utterance(1), utterance(2, arrived_s=1.0), listened(3, 1.0), listened(4, 0.3)
    launch = calm_scheduler().pick(100.0, (new, newer, fine))
    assert launch is not None and launch.rows == [new, newer]
    launch = scheduler().pick(100.0, (new, newer, fine))
    assert launch is not None and fine in launch.rows
    launch = calm_scheduler().pick(100.0, (new, newer, fine, short))
    assert launch is not None and short in launch.rows


def test_in_a_calm_no_launch_is_much_longer_than_the_frame_of_a_newcomer() -> None:
    """The Code Predictor of one row takes 6 ms here, the Talker of two 5.2, of four 7.6."""
    many = [listened(number, 1.0) for number in range(8)]
    launch = calm_scheduler().pick(100.0, many)
    assert launch is not None and (launch.stage, len(launch.rows)) == (Stage.TALKER, 2)
    launch = scheduler().pick(100.0, many)
    assert launch is not None and len(launch.rows) == 8


def test_when_it_is_calm() -> None:
    calm = calm_scheduler()
    for others, until_s in [
        ([listened(1, 1.0), listened(2, 2.0)], 100.7),
        ([utterance(1)], math.inf),
        ([listened(1, 1.0), utterance(2, pace="file")], -math.inf),
    ]:
        calm.pick(100.0, others)
        assert calm.calm_until_s == until_s if math.isinf(until_s) else until_s - 0.1 < calm.calm_until_s < until_s
    never = scheduler()
    never.pick(100.0, [listened(1, 1.0)])
    assert never.calm_until_s == -math.inf
