"""The yardstick itself: it passes what is whole and finds each kind of damage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import resample_poly

from tests.browser.matching import RATE, Signal, match, resample, without_gaps

LEAD_S = 0.7


@pytest.fixture(scope="module")
def reference() -> Signal:
    """Two seconds like a voice: a gliding pitch with its overtones, a pause in the middle."""
    at = np.arange(2 * RATE) / RATE
    phase = 2 * np.pi * np.cumsum(120 + 40 * np.sin(2 * np.pi * 0.7 * at)) / RATE
    voice = sum(np.sin(n * phase + n * n) / n for n in range(1, 12))
    syllables = 0.25 + 0.75 * np.abs(np.sin(2 * np.pi * 2.3 * at))
    syllables[round(0.95 * RATE) : round(1.05 * RATE)] = 0
    return np.asarray(0.2 * voice * syllables)


def recorded(signal: Signal) -> Signal:
    """As it would lie in a recording: later, a little quieter, over a faint hiss."""
    around = np.zeros(round(LEAD_S * RATE))
    hiss = np.random.default_rng(1).normal(0, 1e-4, len(signal) + 2 * len(around))
    return 0.9 * np.concatenate((around, signal, around)) + hiss


def at(seconds: float) -> int:
    return round(seconds * RATE)


def test_a_whole_recording_has_no_problems(reference: Signal) -> None:
    found = match(reference, recorded(reference))
    assert found.problems() == []
    assert found.lag_s == pytest.approx(LEAD_S, abs=1e-4)
    assert found.worst > 0.99 and found.lag_spread_s < 0.001


def test_another_sample_rate_is_no_damage(reference: Signal) -> None:
    at_48k = resample_poly(recorded(reference), 2, 1)
    assert match(reference, resample(at_48k * 32768, 48000)).problems() == []


@pytest.mark.parametrize("start_s", [0.1, 0.43, 0.6, 1.31, 1.9])
def test_a_gap_of_40_ms_is_found(reference: Signal, start_s: float) -> None:
    damaged = reference.copy()
    damaged[at(start_s) : at(start_s + 0.04)] = 0
    assert any("dropout" in problem for problem in match(reference, recorded(damaged)).problems())


@pytest.mark.parametrize("shift_s", [0.02, -0.02])
def test_a_shift_of_20_ms_in_the_middle_is_found(reference: Signal, shift_s: float) -> None:
    first, second = reference[: at(1)], reference[at(1) :]
    damaged = np.concatenate((first, np.zeros(at(shift_s)), second)) if shift_s > 0 else np.concatenate((first[: at(shift_s)], second))
    problems = match(reference, recorded(damaged)).problems()
    assert any("the lag wanders by 20" in problem for problem in problems)


def test_a_missing_start_is_found(reference: Signal) -> None:
    damaged = reference.copy()
    damaged[: at(0.1)] = 0
    assert any("head" in problem for problem in match(reference, recorded(damaged)).problems())


def test_noise_is_found(reference: Signal) -> None:
    noise = np.random.default_rng(2).normal(0, 0.1, len(reference))
    assert match(reference, recorded(reference + noise)).problems()
    assert match(reference, recorded(noise)).problems()


def test_silence_is_found(reference: Signal) -> None:
    assert match(reference, np.zeros(3 * RATE)).problems()


def test_only_a_recorders_own_zeros_are_left_out() -> None:
    sound = np.round(8000 * np.sin(np.arange(48_000) * 0.05)).astype(np.int16)
    sound[0] = 1
    block = np.zeros(480, np.int16)
    gapped = np.concatenate([sound[:7000], block, sound[7000:20_000], block, sound[20_000:]])
    assert np.array_equal(without_gaps(gapped, 48_000), sound)
    lost = sound.copy()
    lost[9000:9960] = 0
    quiet = np.concatenate([sound[:7000] // 8000, block, sound[7000:] // 8000])
    for kept in (sound, lost, quiet, np.concatenate([sound[:7000], block[:400], sound[7000:]]), block):
        assert np.array_equal(without_gaps(kept, 48_000), kept)
