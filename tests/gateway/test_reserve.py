"""What a listener is told to hold: never more than it has in speech, so that it does not stretch it; little in silence, and comfort noise then;
nothing new for one that does not follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.media.reserve import BAND_S, CHUNK_S, COLD_S, FADES_S, FRESH_S, MOST_MORE_S, PASSES_S, SOON_S, STARTS_S, STEP_S, Reserve

EVERY_S = 0.2
QUIET_S, SPEECH_S = 0.02, 0.08
HELD_S = 0.03
"""In silence, after a while."""
START_S = 0.08
"""What a browser wants to hold before it knows its network."""
reports = st.tuples(
    st.floats(0.0, 1.0),
    st.sampled_from(["as told", None, 0.08]),
    st.floats(0.0, 0.3),
    st.none() | st.floats(0.0, 0.2),
    st.booleans(),
    st.floats(-0.1, 0.3),
    st.booleans(),
)


@given(st.lists(reports, max_size=60), st.floats(0.0, 0.1), st.floats(0.06, 0.3))
def test_whatever_is_reported_what_is_told_and_sent_stays_within_bounds(claims, quiet_s: float, speech_s: float) -> None:
    told: list[float] = [speech_s]
    reserve, now_s = Reserve(quiet_s, speech_s, told.append), 0.0
    least_s = min(max(quiet_s, speech_s - MOST_MORE_S), speech_s) - 1e-6
    assert 0.0 <= reserve.least_s <= least_s + 1e-5
    for wait_s, target, depth_s, network_s, sounding, holds_s, begins in claims:
        now_s += wait_s
        count = len(told)
        reserve.report(told[-1] if target == "as told" else target, depth_s, network_s, sounding, now_s)
        if sounding:
            assert all(before < now <= depth_s for before, now in zip(told[count - 1 :], told[count:], strict=False)), "only more, and what is there"
        before_s = told[-1]
        comfort = reserve.quiet(holds_s, now_s)
        if comfort:
            assert not sounding and told[-1] <= min(before_s, max(least_s, holds_s - BAND_S) + STEP_S + 1e-4)
        if begins:
            assert 0.0 <= reserve.begin(depth_s if comfort else None, now_s) <= max(speech_s - depth_s, 0.0)
            assert not reserve.quiet(holds_s, now_s)
        assert all(least_s <= each <= speech_s for each in told)


def reserve_that_heeds(told: list[float]) -> Reserve:
    """In silence, at one second."""
    reserve = Reserve(QUIET_S, SPEECH_S, told.append)
    reserve.report(SPEECH_S, 0.08, None, False, 1.0 - EVERY_S)
    reserve.report(QUIET_S, 0.05, None, False, 1.0)
    return reserve


def new_reserve(told: list[float] | None = None) -> Reserve:
    """Of a browser that says it can be told; its first packet leaves at one second."""
    reserve = Reserve(QUIET_S, SPEECH_S, [].append if told is None else told.append, can_hold=True)
    assert reserve.new and reserve.quiet(HELD_S, 1.0)
    return reserve


def test_a_new_listener_is_sent_comfort_noise_until_it_is_spoken_to() -> None:
    reserve = new_reserve()
    reserve.report(SPEECH_S, 0.01, START_S, False, 1.05)
    for number in range(1, 40):
        assert reserve.quiet(HELD_S, 1.0 + EVERY_S * number)
        reserve.report(QUIET_S, 0.01, START_S if number < 3 else 0.02, False, 1.0 + EVERY_S * number)
    reserve.begin(0.01, 9.0)
    assert not reserve.new and not reserve.quiet(HELD_S, 9.0)


def test_what_is_said_to_it_at_once_is_as_much_as_it_wants_before_it_knows_its_network() -> None:
    reserve = new_reserve()
    first_s = reserve.first_waits_s(0.04, 1.2)
    assert START_S < first_s + CHUNK_S - 0.02 < START_S + 0.01, "a chunk of 80 ms, and where its first packet is to be"
    assert START_S < 0.03 + reserve.begin(0.03, 1.2) < START_S + 0.01
    later = new_reserve()
    later.report(SPEECH_S, 0.01, None, False, 1.1)
    later.report(QUIET_S, 0.01, 0.02, False, 1.9)
    assert later.first_waits_s(0.04, 1.9) < 0.0 and later.begin(0.03, 1.9) == pytest.approx(SPEECH_S - 0.03)


@pytest.mark.parametrize(("target_s", "network_s"), [(SPEECH_S, 0.02), (QUIET_S, 0.1)])
def test_one_that_does_not_follow_or_has_a_bad_network_is_sent_silence_when_that_is_known(target_s: float, network_s: float) -> None:
    reserve = new_reserve()
    for number in range(6):
        reserve.report(target_s, 0.01, network_s, False, 1.0 + EVERY_S * number)
        assert reserve.quiet(HELD_S, 1.0 + EVERY_S * number) == (EVERY_S * number < STARTS_S)


def test_one_that_reports_nothing_is_waited_for_and_sent_silence_after_a_while() -> None:
    reserve = new_reserve()
    assert reserve.quiet(HELD_S, 0.99 + COLD_S) and reserve.awaited
    assert not reserve.quiet(HELD_S, 1.01 + COLD_S) and not reserve.awaited


def test_one_that_reports_no_more_is_sent_silence_after_a_while() -> None:
    reserve = new_reserve()
    reserve.report(SPEECH_S, 0.01, None, False, 0.9)
    reserve.report(QUIET_S, 0.01, 0.02, False, 1.1)
    assert reserve.quiet(HELD_S, 1.09 + FRESH_S) and not reserve.quiet(HELD_S, 1.11 + FRESH_S)


def test_only_one_that_says_it_can_be_told_is_waited_for_and_only_until_it_reports() -> None:
    assert not Reserve(QUIET_S, SPEECH_S, [].append).awaited
    reserve = new_reserve()
    assert reserve.awaited
    reserve.report(SPEECH_S, 0.01, None, False, 3.0)
    assert not reserve.awaited and reserve.new
    assert reserve.first_waits_s(0.08, 3.0) > 0.0, "its output has slept until just now, and its receiver knows nothing of its network yet"
    reserve.report(SPEECH_S, 0.01, None, False, 3.0 + STARTS_S)
    assert reserve.first_waits_s(0.08, 3.0 + STARTS_S) < 0.0


def test_one_that_cannot_be_told_or_is_to_hold_as_much_in_silence_is_not_sent_comfort_noise_at_first() -> None:
    assert not Reserve(QUIET_S, SPEECH_S, [].append).new
    assert not Reserve(SPEECH_S, SPEECH_S, [].append, can_hold=True).new
    assert not Reserve(QUIET_S, 0.4, [].append, can_hold=True).new


def test_one_that_does_not_follow_is_sent_silence_and_sound_as_before() -> None:
    told: list[float] = []
    reserve = Reserve(QUIET_S, SPEECH_S, told.append)
    for number in range(30):
        reserve.report(SPEECH_S, 0.08, None, 10 < number < 20, EVERY_S * number)
        assert not reserve.quiet(HELD_S, EVERY_S * number)
    assert told == [QUIET_S] and reserve.begin(None, 9.0) == 0.0


def test_the_lead_that_is_pinned_never_changes() -> None:
    told: list[float] = []
    reserve = Reserve(SPEECH_S, SPEECH_S, told.append)
    for now_s, depth_s in ((0.0, 0.08), (1.0, 0.08), (2.0, 0.03), (2.2, 0.03)):
        reserve.report(SPEECH_S, depth_s, None, False, now_s)
        assert not reserve.quiet(HELD_S, now_s)
    assert told == []


def test_silence_becomes_comfort_noise_when_speech_has_faded_and_ends_with_the_next_word_or_without_reports() -> None:
    told: list[float] = []
    reserve = reserve_that_heeds(told)
    assert told == [QUIET_S] and reserve.quiet(HELD_S, 1.0) and not reserve.quiet(HELD_S, 1.0 + FRESH_S)
    assert reserve.begin(0.03, 1.1) == pytest.approx(SPEECH_S - 0.03) and not reserve.quiet(HELD_S, 1.1)
    reserve.report(QUIET_S, 0.07, None, True, 1.2)
    assert told[1:] == [0.07], "what it has by now"
    reserve.report(0.07, 0.08, None, True, 1.4)
    reserve.report(0.08, 0.08, None, False, 1.6)
    assert not reserve.quiet(HELD_S, 1.39 + FADES_S) and told[2:] == [SPEECH_S], "its last word may still sound"
    assert reserve.quiet(HELD_S, 1.41 + FADES_S) and told[3:] == [QUIET_S], "it is known to follow"


def test_it_is_told_to_hold_less_only_as_it_does_hold_less() -> None:
    told: list[float] = []
    reserve = reserve_that_heeds(told)
    reserve.begin(HELD_S, 1.1)
    reserve.report(QUIET_S, SPEECH_S, None, True, 1.2)
    reserve.report(SPEECH_S, SPEECH_S, None, False, 1.4)
    del told[:]
    assert reserve.quiet(SPEECH_S, 1.55) and told == [pytest.approx(SPEECH_S - BAND_S)], "right behind speech: it plays as much behind as in speech"
    reserve.report(told[-1], SPEECH_S, None, False, 1.6)
    assert reserve.quiet(SPEECH_S - STEP_S / 2, 1.75) and len(told) == 1
    assert reserve.quiet(0.05, 1.95) and told[1:] == [pytest.approx(0.05 - BAND_S)]
    for number in range(30):
        reserve.report(told[-1], 0.05, None, False, 2.0 + EVERY_S * number)
        assert reserve.quiet(0.05, 2.15 + EVERY_S * number)
    assert len(told) == 2, "however long that takes"
    assert reserve.quiet(QUIET_S + BAND_S + STEP_S / 2, 8.0) and len(told) == 3
    assert reserve.quiet(0.0, 8.2) and told[3:] == [QUIET_S]


def test_what_a_listener_holds_at_least_is_less_than_what_it_holds_in_speech() -> None:
    reserve = reserve_that_heeds([])
    assert reserve.least_s == 0.0 and reserve.begin(-0.01, 1.1) == pytest.approx(SPEECH_S - SOON_S)
    assert Reserve(QUIET_S, 0.4, lambda target_s: None).least_s == pytest.approx(0.4 - MOST_MORE_S - 0.02)


def test_who_may_be_passing_over_silence_when_speech_begins_is_told_to_be_done_with_that() -> None:
    told: list[float] = []
    reserve = reserve_that_heeds(told)
    reserve.report(QUIET_S, 0.045, None, False, 1.2)
    assert reserve.begin(None, 1.3) == pytest.approx(SPEECH_S - 0.045) and told == [QUIET_S, pytest.approx(0.045 - BAND_S)]


def test_nothing_is_sent_ahead_by_reports_that_do_not_agree() -> None:
    reserve = reserve_that_heeds([])
    assert reserve.begin(None, 1.1) == 0.0


def test_on_a_bad_network_silence_is_sent_like_sound_and_less_is_held_only_long_after_speech() -> None:
    told: list[float] = []
    reserve = Reserve(QUIET_S, SPEECH_S, told.append)
    for number in range(19 + round(PASSES_S / EVERY_S)):
        # Speech from the eleventh to the nineteenth.
        reserve.report(told[-1] if told else SPEECH_S, 0.08, 0.1, 10 < number < 20, EVERY_S * number)
        assert not reserve.quiet(HELD_S, EVERY_S * number)
    assert told == [QUIET_S, SPEECH_S] and reserve.begin(None, 9.0) == 0.0
    reserve.report(SPEECH_S, 0.08, 0.1, False, 9.0 + PASSES_S)
    assert told[2:] == [QUIET_S]
