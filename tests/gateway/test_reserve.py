"""What a listener is told to hold: never more than it has in speech, so that it does not stretch it; little in silence; nothing new for one
that does not follow. On lists of reports, and against a receiver in miniature."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.media.reserve import FADES_S, FRESH_S, LEAST_DEPTH_S, MOST_EASED_S, MOST_HELD_BACK_S, MOST_LATE_S, MOST_MORE_S, STEADY_S, Reserve

EVERY_S = 0.2
QUIET_S, SPEECH_S = 0.02, 0.08
STEP_EVERY_S = 0.05
BAND_S = 0.02
"""A receiver leaves sound alone while it plays less than this beyond its target."""


class Receiver:
    """Follows what it is told as a browser does: stretches below its target, passes over sound beyond the band, a little every STEP_EVERY_S, and
    not otherwise."""

    def __init__(self, network_s: float) -> None:
        self.network_s = network_s
        """What it would hold by itself."""
        self.target_s = self.depth_s = SPEECH_S
        self.late_s = 0.0
        """How much less prompt than the promptest the packets were that it remembers: those before speech began."""
        self.touched_s = 0.0
        """Stretched or passed over by so much, in all."""

    def run(self, seconds: float, sounding: bool) -> None:
        self.late_s = self.late_s if sounding else 0.0
        for _ in range(round(seconds / STEP_EVERY_S)):
            target_s = max(self.target_s, self.network_s)
            high = self.depth_s >= target_s + BAND_S + self.late_s
            # Of silence the least that it can, of speech a period of the voice.
            step_s = (0.01 if sounding else 0.0025) * ((self.depth_s < target_s) - high)
            self.depth_s += step_s
            self.touched_s += abs(step_s)


class Listening:
    """A reserve and a receiver, with a report every EVERY_S."""

    def __init__(self, network_s: float = 0.0, *, follows: bool = True) -> None:
        self.reserve = Reserve(QUIET_S, SPEECH_S, self._told)
        self.receiver = Receiver(network_s)
        self.follows = follows
        self.now_s = 0.0
        self.told: list[float] = []

    def _told(self, target_s: float) -> None:
        self.told.append(target_s)
        self.receiver.target_s = target_s if self.follows else self.receiver.target_s

    def pass_time(self, seconds: float, *, sounding: bool) -> None:
        for _ in range(round(seconds / EVERY_S)):
            self.receiver.run(EVERY_S, sounding)
            self.now_s += EVERY_S
            self.reserve.report(self.receiver.target_s, self.receiver.depth_s, sounding, self.now_s)

    def begin(self) -> float:
        more_s = self.reserve.begin(self.now_s)
        self.receiver.depth_s += more_s
        self.receiver.late_s = more_s
        return more_s


@given(st.floats(0.0, 0.2), st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.4, 6.0)), min_size=1, max_size=6))
def test_no_speech_is_stretched_or_hurried_however_short_the_silence_before_it(network_s: float, spurts: list[tuple[float, float]]) -> None:
    listening = Listening(network_s)
    listening.pass_time(5.0, sounding=False)
    for silence_s, speech_s in spurts:
        listening.pass_time(silence_s, sounding=False)
        in_silence_s = listening.receiver.depth_s
        if silence_s >= FADES_S + 3.0:
            assert in_silence_s < max(QUIET_S, network_s) + BAND_S
        assert 0.0 <= listening.begin() <= MOST_MORE_S
        in_speech_s = listening.receiver.depth_s
        assert in_speech_s >= min(SPEECH_S, in_silence_s + MOST_MORE_S) - STEADY_S
        before_s = listening.receiver.touched_s
        listening.pass_time(speech_s, sounding=True)
        assert listening.receiver.touched_s == before_s and listening.receiver.depth_s == in_speech_s


reports = st.tuples(st.floats(0.0, 1.0), st.sampled_from(["as told", None, 0.08]), st.floats(0.0, 0.3), st.booleans(), st.booleans())


@given(st.lists(reports, max_size=60), st.floats(0.0, 0.1), st.floats(0.06, 0.3))
def test_whatever_is_reported_what_is_told_and_sent_stays_within_bounds(claims, quiet_s: float, speech_s: float) -> None:
    told: list[float] = [speech_s]
    reserve, now_s = Reserve(quiet_s, speech_s, told.append), 0.0
    least_s = min(max(quiet_s, speech_s - MOST_MORE_S), speech_s) - 1e-6
    for wait_s, target, depth_s, sounding, begins in claims:
        now_s += wait_s
        count = len(told)
        reserve.report(told[-1] if target == "as told" else target, depth_s, sounding, now_s)
        assert 0.0 <= reserve.patience_s(now_s) <= max(min(MOST_HELD_BACK_S, depth_s - LEAST_DEPTH_S), 0.0)
        if begins:
            before_s = told[-1]
            assert 0.0 <= reserve.begin(now_s) <= min(MOST_MORE_S, max(speech_s - depth_s, 0.0))
            assert told[-1] <= max(before_s, depth_s)
        assert all(least_s <= each <= speech_s for each in told)
        if sounding:
            assert all(before < now <= depth_s for before, now in zip(told[count - 1 :], told[count:], strict=False)), "only more, and what is there"


def test_one_that_does_not_follow_is_sent_sound_as_before() -> None:
    listening = Listening(follows=False)
    for _ in range(3):
        listening.pass_time(FADES_S + 1.0, sounding=False)
        assert listening.told[-1] == QUIET_S
        assert listening.begin() == 0.0
        listening.pass_time(2.0, sounding=True)


def test_the_lead_that_is_pinned_never_changes() -> None:
    told: list[float] = []
    reserve = Reserve(SPEECH_S, SPEECH_S, told.append)
    for now_s, depth_s in ((0.0, 0.08), (1.0, 0.08), (2.0, 0.03), (2.2, 0.03)):
        reserve.report(SPEECH_S, depth_s, False, now_s)
    assert reserve.begin(2.3) == 0.0 and told == []


def test_nothing_is_sent_ahead_by_hearsay() -> None:
    """Before two reports agree, and when they are out of date, it is not known what the listener lacks."""

    def reported(*depths_s: float) -> Reserve:
        reserve = Reserve(QUIET_S, SPEECH_S, lambda target_s: None)
        reserve.report(SPEECH_S, 0.08, False, 0.0)
        for number, depth_s in enumerate(depths_s, 1):
            reserve.report(QUIET_S, depth_s, False, EVERY_S * number)
        return reserve

    assert reported().begin(0.1) == 0.0
    assert reported(0.03).begin(0.3) == 0.0
    assert reported(0.06, 0.03).begin(0.5) == 0.0
    assert reported(0.06, 0.03, 0.03).begin(0.7) == pytest.approx(0.05)
    assert reported(0.06, 0.03, 0.03).begin(0.7 + FRESH_S) == 0.0


def test_it_is_told_to_hold_little_only_when_speech_has_faded() -> None:
    told: list[float] = []
    reserve = Reserve(QUIET_S, SPEECH_S, told.append)
    reserve.report(SPEECH_S, 0.08, True, 1.0)
    reserve.report(SPEECH_S, 0.08, False, 1.0 + FADES_S / 2)
    assert told == []
    reserve.report(SPEECH_S, 0.08, False, 1.0 + FADES_S)
    assert told == [QUIET_S]


def test_in_a_calm_silence_less_is_sent_ahead_once_and_again_only_after_speech() -> None:
    reserve = Reserve(QUIET_S, SPEECH_S, lambda target_s: None)
    eased, now_s, depth_s = [], 0.0, SPEECH_S
    for spurt in range(2):
        reserve.report(QUIET_S, depth_s, True, now_s)
        for _ in range(30):
            now_s += EVERY_S
            depth_s = max(depth_s - 0.01, QUIET_S + 0.018) if len(eased) == spurt else depth_s
            reserve.report(QUIET_S, depth_s, False, now_s)
            late_s = reserve.patience_s(now_s)
            if less_s := reserve.ease(now_s):
                eased.append(less_s)
                depth_s -= less_s
                late_s = less_s + reserve.patience_s(now_s)
            assert late_s <= MOST_LATE_S and reserve.ease(now_s) == 0.0
        assert depth_s == pytest.approx(QUIET_S + 0.008) and len(eased) == spurt + 1
        more_s = reserve.begin(now_s)
        assert more_s == pytest.approx(min(SPEECH_S - depth_s, MOST_MORE_S))
        depth_s += more_s
    assert eased == [MOST_EASED_S] * 2
