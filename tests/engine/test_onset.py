"""OnsetTrim: never removes sound, never more than 400 ms, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.onset import KEEP_S, MOST_S, WINDOW_S, OnsetTrim

RATE = 24_000


def tone(seconds: float, level: float = 0.1) -> np.ndarray:
    t = np.arange(round(seconds * RATE)) / RATE
    return (32767 * level * np.sin(2 * np.pi * 220 * t)).astype(np.int16)


def trim(samples: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, OnsetTrim]:
    onset = OnsetTrim(RATE)
    out, at = [], 0
    while at < len(samples):
        size = sizes[len(out) % len(sizes)]
        out.append(onset.push(samples[at : at + size]))
        at += size
    out.append(onset.flush())
    return np.concatenate(out), onset


@pytest.mark.parametrize("silence_s", [0.0, 0.02, 0.08, 0.24, 0.39])
def test_silence_before_speech_goes_but_for_a_little(silence_s: float) -> None:
    speech = tone(0.5)
    heard, onset = trim(np.concatenate((np.zeros(round(silence_s * RATE), np.int16), speech)), [1920])
    left_s = (len(heard) - len(speech)) / RATE
    assert 0 <= left_s <= KEEP_S + WINDOW_S
    assert np.array_equal(heard[-len(speech) :], speech)
    assert onset.dropped == round(silence_s * RATE) + len(speech) - len(heard)


@pytest.mark.parametrize(("level", "goes"), [(0.007, True), (0.02, False)])
@pytest.mark.parametrize("sizes", [[1920], [100], [240, 1920]])
def test_a_click_where_the_decoder_begins_is_no_sound(level: float, goes: bool, sizes: list[int]) -> None:
    speech = tone(0.5)
    heard, onset = trim(np.concatenate((tone(0.008, level), np.zeros(round(0.3 * RATE), np.int16), speech)), sizes)
    assert (onset.dropped > 0.25 * RATE) == goes and np.array_equal(heard[-len(speech) :], speech)


def test_what_begins_softly_and_goes_on_is_sound() -> None:
    samples = np.concatenate((tone(0.02, 0.007), tone(0.5)))
    assert np.array_equal(trim(samples, [1920])[0], samples)


def test_at_most_400_ms() -> None:
    heard, onset = trim(np.concatenate((np.zeros(2 * RATE, np.int16), tone(0.2))), [1920])
    assert onset.dropped == round(MOST_S * RATE)
    assert len(heard) == 2 * RATE + round(0.2 * RATE) - onset.dropped


def test_a_pause_later_is_kept() -> None:
    samples = np.concatenate((tone(0.2), np.zeros(RATE, np.int16), tone(0.2)))
    heard, _ = trim(samples, [1920])
    assert np.array_equal(heard, samples)


def test_an_utterance_of_silence_ends_with_what_was_held() -> None:
    heard, onset = trim(np.zeros(1920, np.int16), [1920])
    assert len(heard) + onset.dropped == 1920


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.0005, 0.002, 0.004, 0.02, 0.3]), st.floats(0.001, 0.3)), min_size=1, max_size=8),
    st.lists(st.integers(1, 4000), min_size=1, max_size=5),
)
def test_chunks_do_not_matter_and_no_sound_is_lost(parts: list[tuple[float, float]], sizes: list[int]) -> None:
    samples = np.concatenate([tone(seconds, level) for level, seconds in parts])
    heard, onset = trim(samples, sizes)
    assert np.array_equal(heard, samples[onset.dropped :])
    assert onset.dropped == trim(samples, [len(samples)])[1].dropped <= MOST_S * RATE
    # What was dropped is quiet: no 10 ms of it come near the level of speech, but for a click at the very beginning.
    gone = samples[: onset.dropped].astype(float)
    for at in range(0, len(gone), 240):
        assert np.sqrt(np.mean(gone[at : at + 240] ** 2)) <= 32768 * 10 ** ((-50 if at else -40) / 20) + 1
