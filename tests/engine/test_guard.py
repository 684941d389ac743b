"""Guard: what it lets pass, and what it ends."""

from __future__ import annotations

import numpy as np
import pytest

from engine.guard import SPARE_S, Guard, longest_s

RATE, FRAME_S = 24_000, 0.08


def guard() -> Guard:
    return Guard(RATE, FRAME_S)


def test_speech_with_pauses_passes() -> None:
    g = guard()
    rng = np.random.default_rng(1)
    for _ in range(10):
        g.hear((rng.standard_normal(RATE) * 3000).astype(np.int16))
        g.hear(np.zeros(2 * RATE, np.int16))
    assert g.verdict is None


def test_three_seconds_of_near_silence_end_it() -> None:
    g = guard()
    for _ in range(37):
        g.hear(np.full(1920, 5, np.int16))
    assert g.verdict is None
    g.hear(np.full(1920, 5, np.int16))
    assert g.verdict == "silence"


@pytest.mark.parametrize("cycle", [1, 2, 5, 12])
def test_a_loop_of_tokens_ends_it(cycle: int) -> None:
    g = guard()
    for n in range(30):
        g.see(1000 + n)
    for n in range(90):
        g.see(n % cycle)
    assert g.verdict == "repetition"


def test_tokens_that_vary_pass() -> None:
    g = guard()
    rng = np.random.default_rng(2)
    for token in rng.integers(0, 256, 2000):
        g.see(int(token))
    for _ in range(50):
        g.see(7)  # four seconds of one token: a long pause
    assert g.verdict is None


@pytest.mark.parametrize(
    ("text", "ordinary_s"),
    [
        ("Hello there.", 1.0),
        ("The quick brown fox jumps over the lazy dog.", 3.0),
        ("今天天气很好，我们去公园散步吧。", 4.0),
        ("Call 020 7946 0958 now.", 6.0),
        ("안녕하세요, 만나서 반갑습니다.", 3.0),
        ("", 0.0),
    ],
)
def test_the_cap_is_generous_but_finite(text: str, ordinary_s: float) -> None:
    seconds = longest_s(text) + SPARE_S
    assert 1.5 * ordinary_s + 2 <= seconds <= 6 * ordinary_s + 6
