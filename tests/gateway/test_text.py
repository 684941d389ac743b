"""How fast text is written, and how much of it has been heard."""

from __future__ import annotations

import pytest

from gateway.sender import TextRate
from gateway.spoken import SpokenText, word_end

TEXT = "The quick brown fox jumps over the lazy dog."


def test_rate_of_a_steady_writer() -> None:
    rate = TextRate()
    assert rate.chars_per_s is None
    for i in range(100):
        rate.append(1, i * 0.1)
    assert rate.chars_per_s == pytest.approx(10)


def test_pauses_do_not_count_and_the_past_is_forgotten() -> None:
    rate = TextRate()
    now_s = 0.0
    for _ in range(10):
        rate.append(4, now_s)
        now_s += 0.1
    now_s += 3.0
    rate.append(4, now_s)
    assert rate.chars_per_s == pytest.approx(40)
    for _ in range(200):
        now_s += 0.2
        rate.append(1, now_s)
    assert rate.chars_per_s == pytest.approx(5, rel=0.05)


def test_whole_texts_at_once_have_no_rate() -> None:
    rate = TextRate()
    for now_s in (0.0, 5.0, 9.0):
        rate.append(200, now_s)
    assert rate.chars_per_s is None


@pytest.mark.parametrize(("until", "end"), [(0, 0), (2, 0), (3, 3), (4, 3), (9, 9), (12, 9), (43, 39), (44, 44), (99, 44)])
def test_word_end(until: int, end: int) -> None:
    assert word_end(TEXT, until) == end


def test_word_end_without_spaces() -> None:
    assert word_end("日本語です", 3) == 3


def test_heard_is_proportional_once_the_length_is_known() -> None:
    spoken = SpokenText(24000)
    spoken.made(24000, 30)
    spoken.made(72000, len(TEXT))
    spoken.complete(72000)
    assert TEXT[: spoken.heard(TEXT, 36000)] == "The quick brown fox"
    assert spoken.heard(TEXT, 72000) == len(TEXT)
    assert spoken.heard(TEXT, 0) == 0


def test_heard_never_passes_what_the_engine_has_taken() -> None:
    spoken = SpokenText(24000)
    spoken.made(48000, 11)
    assert TEXT[: spoken.heard(TEXT, 48000)] == "The quick"
    assert TEXT[: spoken.heard(TEXT, 12000)] == "The"
    assert SpokenText(24000).heard(TEXT, 24000) == 0
