"""What a listener says, and how far it is believed: honest listeners exactly, liars no further than an honest one could be."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.events import Stats
from gateway.media.opus import PACKET_S, PACKET_SAMPLES, RATE
from gateway.media.pacer import LEAD_S, LONE_LASTS_S, PACKET_TICKS, Slot
from gateway.media.playhead import STALE_S, UNTOLD_S, USUAL_DELAY_S, Packet, Pause, Playhead, Share
from gateway.rtc.feedback import ANSWERS_S, EARLIEST_S, MOST_PER_S, Feedback

BEGUN_S = 100.0


class Stream:
    """A line that has sent one long utterance since BEGUN_S, in real time and LEAD_S ahead, and its listener's feedback."""

    def __init__(self) -> None:
        self.playhead = Playhead(RATE)
        self.feedback = Feedback(self.playhead)
        self.count = 0

    def run(self, until_s: float) -> None:
        """Everything that is due by then is sent."""
        while (plays_s := BEGUN_S + self.count * PACKET_S) - LEAD_S <= until_s:
            slot = Slot(plays_s - LEAD_S, self.count * PACKET_TICKS, self.count == 0, plays_s)
            self.playhead.sent(slot, Packet(b"", (Share(1, PACKET_SAMPLES, self.count == 0),)), plays_s - LEAD_S)
            self.count += 1

    def say(self, now_s: float, rtp_time: int | None, *, age_s: float = 0.0, received: int = 0, concealed_s: float = 0.0, rtt_s: float = 0.0):
        self.run(now_s)
        stats = Stats(rtp_time, age_s * 1000, received, concealed_s * 1000, rtt_ms=rtt_s * 1000)
        return self.feedback.take(stats, rtp_time, now_s)

    def honest(self, now_s: float, delay_s: float, **fields: float):
        """What a listener says that plays everything `delay_s` late."""
        at_s = max(now_s - delay_s - BEGUN_S, 0.0)
        packet = int(at_s / PACKET_S)
        # Rounding may make a packet's own moment seem to come before it.
        return self.say(now_s, packet * PACKET_TICKS, age_s=max(at_s - packet * PACKET_S, 0.0), **fields)


@given(st.floats(0.0, 3.0), st.lists(st.floats(0.101, 1.9), min_size=1, max_size=20))
@example(0.0, [0.3, 0.3, 0.3])
def test_an_honest_listener_is_believed_to_the_sample(delay_s: float, waits_s: list[float]) -> None:
    stream, now_s = Stream(), BEGUN_S + delay_s
    for wait_s in waits_s:
        now_s += wait_s
        assert stream.honest(now_s, delay_s) is None
        for later_s in (0.0, 0.1):
            expected = (now_s + later_s - BEGUN_S - delay_s) * RATE
            sent = stream.count * PACKET_SAMPLES
            assert abs(stream.playhead.heard(1, now_s + later_s) - min(expected, sent)) <= 2
        # Not just between two packets, where rounding decides.
        assert stream.playhead.measured(now_s) and stream.playhead.playing(1, now_s + 1e-6)
        assert abs(stream.playhead.buffered_s(now_s) - (stream.count * PACKET_S - (now_s - BEGUN_S - delay_s))) < 0.001
    assert not stream.feedback.refused and stream.feedback.pause is None


claims = st.tuples(
    st.floats(0.0, 0.6), st.one_of(st.none(), st.integers(-(2**31), 2**31), st.integers(0, 300).map(lambda n: n * PACKET_TICKS)), st.floats(0, 1e6)
)


@given(st.lists(st.tuples(claims, st.integers(0, 2**40), st.floats(0, 1e9), st.floats(0, 1e6)), max_size=60))
def test_no_claim_makes_a_listener_drier_than_one_without_a_buffer(lies) -> None:
    stream, now_s = Stream(), BEGUN_S + 2.0
    heard = 0
    for (wait_s, rtp_time, age_s), received, concealed_s, rtt_s in lies:
        now_s += wait_s
        stream.say(now_s, rtp_time, age_s=age_s, received=received, concealed_s=concealed_s, rtt_s=rtt_s)
        buffered_s = stream.playhead.buffered_s(now_s)
        least_s = stream.count * PACKET_S - (now_s - BEGUN_S) - EARLIEST_S
        assert buffered_s >= least_s - 0.001
        heard = stream.playhead.heard(1, now_s)
        assert 0 <= heard <= stream.count * PACKET_SAMPLES
        # What was made up is at most the time that passed.
        assert 0.0 <= stream.feedback.concealed_s <= (now_s - BEGUN_S) + 0.5 * len(lies)


def test_what_was_never_sent_was_never_heard() -> None:
    stream = Stream()
    assert stream.say(BEGUN_S + 1.0, 10**9) == "never_sent"
    assert stream.say(BEGUN_S + 1.2, None) is None
    assert not stream.playhead.measured(BEGUN_S + 1.2)


def test_a_playhead_does_not_go_backwards() -> None:
    stream = Stream()
    stream.honest(BEGUN_S + 1.0, 0.1)
    assert stream.say(BEGUN_S + 1.2, 10 * PACKET_TICKS) == "backwards"
    assert stream.playhead.heard(1, BEGUN_S + 1.2) == pytest.approx(1.1 * RATE, abs=2)


@given(st.integers(11, 100))
def test_more_than_ten_reports_a_second_are_left_unread(count: int) -> None:
    stream = Stream()
    answers = [stream.honest(BEGUN_S + 1.0 + i / count, 0.1) for i in range(count)]
    assert answers[:MOST_PER_S] == [None] * MOST_PER_S
    assert answers[MOST_PER_S:] == ["too_many"] * (count - MOST_PER_S)
    assert stream.honest(BEGUN_S + 3.0, 0.1) is None


@pytest.mark.parametrize("age_s", [0.0, None])
def test_a_frozen_listener_stands_still_whatever_it_says_of_its_age(age_s: float | None) -> None:
    stream = Stream()
    stream.honest(BEGUN_S + 1.0, 0.1)
    frozen = 45 * PACKET_TICKS
    for i in range(1, 8):
        since_s = 0.2 * i
        assert stream.say(BEGUN_S + 1.0 + since_s, frozen, age_s=since_s if age_s is None else age_s) is None
    now_s = BEGUN_S + 2.4
    assert not stream.playhead.playing(1, now_s) and stream.playhead.measured(now_s)
    assert stream.playhead.heard(1, now_s + 0.5) == 46 * PACKET_SAMPLES
    assert stream.playhead.buffered_s(now_s) == pytest.approx(stream.count * PACKET_S - 46 * PACKET_S, abs=0.001)


def test_one_that_says_nothing_more_is_taken_to_play_on() -> None:
    stream = Stream()
    stream.honest(BEGUN_S + 1.0, 0.3)
    last_s = BEGUN_S + 1.0
    stream.run(last_s + 5.0)
    assert stream.playhead.measured(last_s + STALE_S - 0.1) and not stream.playhead.measured(last_s + STALE_S)
    assert stream.playhead.heard(1, last_s + 5.0) == pytest.approx(5.7 * RATE, abs=2)


def test_without_any_report_it_is_the_usual_delay() -> None:
    stream = Stream()
    stream.run(BEGUN_S + 1.0)
    assert stream.playhead.heard(1, BEGUN_S + 1.0) == pytest.approx((1.0 - USUAL_DELAY_S) * RATE, abs=2)
    assert not stream.playhead.measured(BEGUN_S + 1.0)


def test_paused_is_who_gets_packets_and_plays_none() -> None:
    stream = Stream()
    stream.say(BEGUN_S + 1.0, 40 * PACKET_TICKS, received=45)
    for i, received in enumerate((46, 46, 46)):
        stream.say(BEGUN_S + 1.2 + 0.2 * i, 40 * PACKET_TICKS, age_s=0.2 + 0.2 * i, received=received)
    assert stream.feedback.pause is None, "nothing comes through to it: the network's fault"
    stream.say(BEGUN_S + 1.8, 40 * PACKET_TICKS, age_s=0.8, received=60)
    assert stream.feedback.pause is Pause.STUCK
    stream.say(BEGUN_S + 2.0, 40 * PACKET_TICKS, age_s=1.0, received=60)
    assert stream.feedback.pause is Pause.STUCK, "being sent nothing does not end a pause"
    stream.say(BEGUN_S + 2.2, 44 * PACKET_TICKS, received=60)
    assert stream.feedback.pause is None


def test_concealment_counts_in_speech_only_and_from_what_the_counter_was() -> None:
    stream = Stream()
    stream.honest(BEGUN_S + 0.5, 0.1, concealed_s=7.0)
    stream.honest(BEGUN_S + 0.7, 0.1, concealed_s=7.1)
    assert stream.feedback.concealed_s == pytest.approx(0.1)
    stream.honest(BEGUN_S + 0.9, 0.1, concealed_s=0.0)
    stream.honest(BEGUN_S + 1.1, 0.1, concealed_s=0.02)
    assert stream.feedback.concealed_s == pytest.approx(0.12), "counters that begin anew are a new baseline"
    # All has been played; the counter runs on in silence.
    end_s = BEGUN_S + stream.count * PACKET_S + 0.1
    for i in range(3):
        stats = Stats((stream.count - 1) * PACKET_TICKS, 100 + 200 * i, 0, 1000 * (i + 1))
        stream.feedback.take(stats, stats.rtp_time, end_s + 0.1 + 0.2 * i)
    assert stream.feedback.concealed_s == pytest.approx(0.12)


def test_a_page_that_restarts_is_a_new_listener() -> None:
    stream = Stream()
    stream.honest(BEGUN_S + 2.0, 0.1, concealed_s=3.0)
    again = stream.playhead.begin(BEGUN_S + 2.0)
    assert len(again) == pytest.approx((0.1 + LEAD_S) / PACKET_S, abs=1.01)
    assert not stream.playhead.measured(BEGUN_S + 2.0)
    heard = stream.playhead.heard(1, BEGUN_S + 2.0)
    assert heard <= 1.9 * RATE < heard + PACKET_SAMPLES + 2
    feedback = Feedback(stream.playhead)
    for number, packet in enumerate(again):
        stream.playhead.sent(Slot(0, number * PACKET_TICKS, number == 0, BEGUN_S + 3.0 + number * PACKET_S), packet, BEGUN_S + 3.0)
    assert feedback.take(Stats(0, 10), 0, BEGUN_S + 3.2) is None
    assert stream.playhead.heard(1, BEGUN_S + 3.2) == pytest.approx(heard + 0.01 * RATE, abs=2)


def test_a_listener_that_left_has_heard_what_it_may_have_until_its_next_report() -> None:
    stream = Stream()
    stream.honest(BEGUN_S + 1.0, 0.1)
    stream.run(BEGUN_S + 9.0)
    stream.playhead.leave(BEGUN_S + 9.0)
    assert stream.playhead.heard(1, BEGUN_S + 60.0) == pytest.approx((0.9 + UNTOLD_S) * RATE, abs=2)
    again = stream.playhead.begin(BEGUN_S + 60.0)
    assert len(again) == stream.count - 45 - round(UNTOLD_S / PACKET_S)


def test_what_was_dropped_is_not_sent_again() -> None:
    stream = Stream()
    stream.honest(BEGUN_S + 1.0, 0.1)
    stream.playhead.drop({1}, BEGUN_S + 1.0)
    assert stream.playhead.begin(BEGUN_S + 1.0) == [] and stream.playhead.dry(BEGUN_S + 1.0)


def test_what_is_played_to_nobody_is_sent_again() -> None:
    stream = Stream()
    stream.honest(BEGUN_S + 1.0, 0.1)
    for since_s in (0.1, 0.3, 0.5):
        stream.run(BEGUN_S + 1.0 + since_s)
        stream.feedback.take(Stats(stream.playhead.last_rtp_time, paused=True), stream.playhead.last_rtp_time, BEGUN_S + 1.0 + since_s)
        assert stream.feedback.pause is Pause.UNHEARD
    now_s = BEGUN_S + 1.6
    stream.feedback.take(Stats(stream.playhead.last_rtp_time), stream.playhead.last_rtp_time, now_s)
    assert stream.feedback.pause is None
    assert stream.playhead.heard(1, now_s) == pytest.approx(1.0 * RATE, abs=2) and not stream.playhead.playing(1, now_s)
    again = stream.playhead.rewind(now_s)
    assert len(again) == stream.count - 50
    assert stream.playhead.heard(1, now_s) == 50 * PACKET_SAMPLES and stream.playhead.dry(now_s)


def test_a_listener_in_comfort_noise_does_not_stand_still_for_a_second_and_its_delay_is_not_forgotten_then() -> None:
    playhead = Playhead(RATE)
    feedback = Feedback(playhead)
    playhead.sent(Slot(BEGUN_S, 0, True, BEGUN_S + LEAD_S, LONE_LASTS_S), None, BEGUN_S)
    feedback.take(Stats(0, 500.0, 1), 0, BEGUN_S + LEAD_S + 0.51)
    assert playhead.delay_s == pytest.approx(0.01)
    feedback.take(Stats(0, 5000.0, 1), 0, BEGUN_S + LEAD_S + 5.01)
    assert playhead.delay_s == pytest.approx(0.01)
    playhead.hurried(-0.03)
    assert playhead.delay_s == pytest.approx(-0.02)


def test_the_way_to_it_is_known_by_its_quickest_answer_lately() -> None:
    stream = Stream()
    assert stream.feedback.transit_s == 0.0
    for number, rtt_s in enumerate([0.3, 0.1, *[0.2] * 24, *[0.4] * 24]):
        stream.say(BEGUN_S + number, 0, rtt_s=rtt_s)
        assert stream.feedback.transit_s == pytest.approx(((0.3, *[0.1] * 25, *[0.2] * 24)[number] - ANSWERS_S) / 2)
    near = Stream()
    near.say(BEGUN_S, 0, rtt_s=ANSWERS_S - 0.001)
    assert near.feedback.transit_s == 0.0
