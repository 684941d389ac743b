"""Pacing and the estimate of what was heard, on a list of times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.media.network import MUCH_S
from gateway.media.pacer import BURST_PACKETS, GRACE_S, LEAD_S, MEMORY_S, PACKET_S, PACKET_TICKS, REMEMBERS_S, RTP_RATE, Pacer, Slot
from gateway.media.playout import Playout

EPOCH_S = 1000.0


def send(pacer: Pacer, ready_s: float) -> Slot:
    slot = pacer.slot(ready_s)
    pacer.sent(slot, max(slot.due_s, ready_s))
    return slot


def spurt(pacer: Pacer, at_s: float, packets: int) -> list[Slot]:
    """All packets are ready at `at_s`; each is asked for when the one before it has left."""
    slots: list[Slot] = []
    now_s = at_s
    for _ in range(packets):
        slots.append(send(pacer, now_s))
        now_s = max(now_s, slots[-1].due_s)
    return slots


def test_a_burst_then_real_time() -> None:
    count = BURST_PACKETS + 3
    slots = spurt(Pacer(EPOCH_S), EPOCH_S + 5.0, count)
    assert [slot.rtp_time for slot in slots] == [5 * RTP_RATE + i * PACKET_TICKS for i in range(count)]
    assert [round(slot.due_s - EPOCH_S - 5.0, 6) for slot in slots[BURST_PACKETS:]] == [0.02, 0.04, 0.06]
    assert all(slot.due_s <= EPOCH_S + 5.0 + 1e-9 for slot in slots[:BURST_PACKETS])
    assert [slot.starts_spurt for slot in slots] == [True] + [False] * (count - 1)


def test_rtp_time_runs_on_through_a_pause() -> None:
    pacer = Pacer(EPOCH_S)
    before = spurt(pacer, EPOCH_S + 1.0, 10)[-1]
    after = spurt(pacer, EPOCH_S + 3.507, 3)
    assert after[0].starts_spurt and after[0].due_s == EPOCH_S + 3.507
    assert (after[0].rtp_time - before.rtp_time) % PACKET_TICKS == 0
    assert abs(after[0].rtp_time / RTP_RATE - 3.507) <= 0.01


def test_a_packet_late_within_the_lead_keeps_the_schedule() -> None:
    pacer = Pacer(EPOCH_S)
    spurt(pacer, EPOCH_S, 10)
    due_s = pacer.slot(EPOCH_S).due_s
    late = send(pacer, due_s + LEAD_S + GRACE_S - 0.001)
    assert not late.starts_spurt and late.due_s == pytest.approx(due_s)
    assert send(pacer, due_s + 0.08).due_s == pytest.approx(due_s + 0.02)


def test_a_packet_later_than_that_starts_anew() -> None:
    pacer = Pacer(EPOCH_S)
    last = spurt(pacer, EPOCH_S, 10)[-1]
    due_s = pacer.slot(EPOCH_S).due_s
    late = send(pacer, due_s + LEAD_S + GRACE_S + 0.3)
    assert late.starts_spurt and late.rtp_time > last.rtp_time + PACKET_TICKS
    following = send(pacer, late.due_s)
    assert following.due_s <= late.due_s and following.rtp_time == late.rtp_time + PACKET_TICKS


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=60))
def test_rtp_time_grows_in_whole_packets_and_never_runs_far_ahead(waits_s: list[float]) -> None:
    pacer = Pacer(EPOCH_S)
    now_s, last = EPOCH_S, -PACKET_TICKS
    for wait_s in waits_s:
        now_s += wait_s
        slot = send(pacer, now_s)
        now_s = max(now_s, slot.due_s)
        assert slot.rtp_time % PACKET_TICKS == 0 and slot.rtp_time > last
        # At most the burst and the rounding ahead of the wall clock, at most the lead and the grace behind it.
        ahead_s = slot.rtp_time / RTP_RATE - (now_s - EPOCH_S)
        assert -GRACE_S - 0.03 <= ahead_s <= LEAD_S + 0.011
        last = slot.rtp_time


def test_a_packet_that_leaves_alone_is_as_far_ahead_as_the_others_and_what_follows_goes_on_from_it() -> None:
    pacer = Pacer(EPOCH_S)
    before = spurt(pacer, EPOCH_S, 10)[-1]
    now_s = before.due_s + 0.2
    alone = pacer.alone(now_s)
    pacer.sent(alone, now_s)
    assert alone.due_s == now_s and alone.rtp_time == before.rtp_time + 10 * PACKET_TICKS
    assert alone.plays_s == pytest.approx(now_s + LEAD_S)
    following = pacer.slot(now_s)
    assert not following.starts_spurt and following.rtp_time == alone.rtp_time + PACKET_TICKS and following.due_s == pytest.approx(now_s + PACKET_S)


@given(st.lists(st.tuples(st.floats(0.001, 0.4), st.booleans(), st.floats(0.0, 0.2)), min_size=1, max_size=60))
def test_rtp_time_that_goes_back_never_looks_like_more_than_60_ms_of_jitter(steps: list[tuple[float, bool, float]]) -> None:
    pacer, now_s, last = Pacer(EPOCH_S), EPOCH_S, -PACKET_TICKS
    prompt: list[tuple[float, float]] = []
    for wait_s, more, back_s in steps:
        now_s += wait_s
        if more:
            pacer.hurry(back_s / 2)
        room_s = pacer.room_s(now_s, MUCH_S)
        if room_s > 0.0:
            pacer.hurry(-min(back_s, room_s))
        slot = pacer.alone(now_s)
        pacer.sent(slot, now_s)
        assert slot.rtp_time > last
        last = slot.rtp_time
        ahead_s = slot.rtp_time / RTP_RATE - now_s
        remembered = [ahead for at_s, ahead in prompt if at_s >= now_s - MEMORY_S]
        # Without rounding; the track sees to that where it matters.
        if room_s > 0.0:
            assert max(remembered, default=ahead_s) - ahead_s <= MUCH_S + PACKET_S / 2 + 1e-6
        prompt.append((now_s, ahead_s))


@given(st.floats(0.0, 0.5), st.floats(0.0005, 0.0195), st.floats(0.02, 0.12), st.integers(1, 40))
def test_a_word_soon_behind_a_packet_of_comfort_noise_follows_it_without_a_packet_between(rest_s, less_s, depth_s, packets: int) -> None:
    pacer = Pacer(EPOCH_S)
    pacer.hurry(rest_s)
    now_s = spurt(pacer, EPOCH_S + 1.0, packets)[-1].due_s + PACKET_S
    comfort = pacer.alone(now_s)
    pacer.sent(comfort, now_s)
    # Its RTP time could go back by as much as has passed but for the packet itself.
    now_s += PACKET_S + less_s
    back_s = pacer.back_s(now_s, depth_s, max(pacer.room_s(now_s, MUCH_S), 0.0))
    pacer.hurry(-back_s)
    assert pacer.alone(now_s).rtp_time == comfort.rtp_time + PACKET_TICKS


def test_after_two_seconds_rtp_time_can_go_back_further() -> None:
    pacer = Pacer(EPOCH_S)
    now_s = spurt(pacer, EPOCH_S, 10)[-1].due_s
    gone_s = []
    for _ in range(30):
        now_s += 0.2
        gone_s.append(max(pacer.room_s(now_s, MUCH_S), 0.0))
        pacer.hurry(-gone_s[-1])
        pacer.sent(pacer.alone(now_s), now_s)
    assert sum(gone_s[:10]) <= MUCH_S + PACKET_S and sum(gone_s) >= 2 * MUCH_S


@given(st.floats(0.0, 2.0), st.floats(0.0, 0.5))
def test_whose_clock_stood_still_gets_the_next_packet_as_much_later_and_takes_none_for_late(stood_s: float, wait_s: float) -> None:
    pacer, still = Pacer(EPOCH_S), Pacer(EPOCH_S)
    for each in (pacer, still):
        each.sent(each.alone(EPOCH_S), EPOCH_S)
    pacer.stood(stood_s)
    for each, now_s in ((pacer, EPOCH_S + wait_s + stood_s), (still, EPOCH_S + wait_s)):
        assert each.behind_s(now_s) == pytest.approx(0.0, abs=PACKET_S / 2 + 1e-9)
    assert pacer.room_s(EPOCH_S + wait_s + stood_s, MUCH_S) == pytest.approx(still.room_s(EPOCH_S + wait_s, MUCH_S), abs=1e-6)
    assert abs(pacer.alone(EPOCH_S + wait_s + stood_s).rtp_time - still.alone(EPOCH_S + wait_s).rtp_time) <= PACKET_TICKS


def test_a_packet_made_less_prompt_is_behind_until_the_prompter_ones_are_about_to_be_forgotten() -> None:
    pacer = Pacer(EPOCH_S)
    last_s = spurt(pacer, EPOCH_S, 10)[-1].due_s
    assert pacer.behind_s(last_s) == pytest.approx(0.0, abs=1e-9)
    pacer.hurry(-0.03)
    for number in range(1, 12):
        now_s = last_s + 0.2 * number
        pacer.sent(pacer.alone(now_s), now_s)
        # Whole packets: its RTP time is as far back as the clock, or up to half a packet off.
        assert pacer.behind_s(now_s) == pytest.approx(0.03 if now_s - last_s <= REMEMBERS_S else 0.0, abs=PACKET_S / 2 + 1e-9)
    assert REMEMBERS_S < MEMORY_S
    pacer.hurry(0.05)
    assert pacer.behind_s(now_s) == 0.0


def test_heard_follows_the_clock_and_stops_when_dry() -> None:
    playout = Playout(24000)
    assert playout.heard(1, 5.0) == 0 and not playout.playing(1, 5.0)
    playout.sent(1, 24000, 10.0)
    assert [playout.heard(1, now_s) for now_s in (10.0, 10.5, 11.0, 20.0)] == [0, 12000, 24000, 24000]
    assert [playout.playing(1, now_s) for now_s in (10.0, 10.5, 11.0)] == [True, True, False]
    playout.sent(1, 24000, 20.0)
    assert playout.heard(1, 20.5) == 36000
    assert playout.dry(21.0) and not playout.dry(20.9)


def test_one_utterance_is_heard_after_the_other() -> None:
    playout = Playout(24000)
    playout.sent(1, 24000, 0.0)
    playout.sent(2, 48000, 0.1)
    assert (playout.heard(1, 0.5), playout.heard(2, 0.5)) == (12000, 0)
    assert playout.playing(1, 0.5) and not playout.playing(2, 0.5)
    assert (playout.heard(1, 2.0), playout.heard(2, 2.0)) == (24000, 24000)
    playout.cut(2.0)
    assert (playout.heard(2, 9.0), playout.dry(2.0)) == (24000, True)
    playout.sent(3, 2400, 9.0)
    assert playout.heard(3, 9.05) == 1200


def test_cut_before_anything_was_sent() -> None:
    playout = Playout(24000)
    playout.cut(1.0)
    playout.sent(1, 2400, 2.0)
    assert playout.heard(1, 2.05) == 1200


def test_after_a_pause_rtp_time_goes_back_no_further_than_in_silence() -> None:
    pacer = Pacer(EPOCH_S)
    now_s = spurt(pacer, EPOCH_S, 10)[-1].due_s + 40.0
    assert pacer.room_s(now_s, MUCH_S) <= MUCH_S + 1e-6
