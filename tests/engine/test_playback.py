"""PlaybackClock against a listener simulated second by second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.playback import PlaybackClock

RATE = 24_000


def test_starts_with_the_first_chunk_and_runs_in_real_time() -> None:
    clock = PlaybackClock(RATE)
    assert clock.heard(5.0) == 0
    clock.emit(RATE, 10.0)
    assert clock.heard(10.5) == RATE // 2
    assert clock.buffered_s(10.5) == 0.5
    assert clock.dry_at(10.5) == 11.0


def test_stands_still_while_dry_and_goes_on_with_the_next_chunk() -> None:
    clock = PlaybackClock(RATE)
    clock.emit(RATE, 10.0)
    assert clock.heard(13.0) == RATE
    clock.emit(RATE, 13.0)
    assert clock.heard(13.0) == RATE
    assert clock.dry_at(13.0) == 14.0


def test_a_report_moves_the_clock_and_says_whether_it_was_measured() -> None:
    clock = PlaybackClock(RATE)
    clock.emit(4 * RATE, 10.0)
    clock.report(RATE, True, True, 12.0)
    assert clock.measured
    assert clock.heard(12.5) == RATE + RATE // 2
    assert clock.dry_at(12.0) == 15.0


def test_a_paused_listener_keeps_its_buffer_and_may_resume_at_once() -> None:
    clock = PlaybackClock(RATE)
    clock.report(0, False, False, 9.0)
    clock.emit(2 * RATE, 10.0)
    assert clock.buffered_s(60.0) == 2.0
    assert clock.dry_at(60.0) == 62.0


def test_a_claim_beyond_what_was_sent_counts_as_all_of_it() -> None:
    clock = PlaybackClock(RATE)
    clock.emit(RATE, 1.0)
    clock.report(10 * RATE, True, True, 1.1)
    assert clock.heard(1.1) == RATE
    clock.report(-5, True, True, 1.2)
    assert clock.heard(1.2) == 0


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 3 * RATE)), min_size=1, max_size=30))
def test_agrees_with_a_listener_who_plays_every_sample_once(chunks: list[tuple[float, int]]) -> None:
    """Against a model that keeps the end of playback instead of a position."""
    clock = PlaybackClock(RATE)
    now_s, dry_s, sent = 0.0, 0.0, 0
    for wait_s, samples in chunks:
        now_s += wait_s
        clock.emit(samples, now_s)
        dry_s = max(dry_s, now_s) + samples / RATE
        sent += samples
        assert abs(clock.dry_at(now_s) - dry_s) < 0.001
        assert 0 <= clock.heard(now_s) <= sent
    assert clock.heard(dry_s + 1.0) == sent
