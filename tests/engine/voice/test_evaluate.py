"""The evaluation speaks through a real engine process."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine.messages import Sampling
from engine.voice.evaluate import HERE, RATE, Judge, Spoken, engine, speak
from engine.voice.judge import SAMPLE_RATE, Sentence

TEXT = "He waved goodbye."
SEED = Sampling(seed=5)


async def test_streamed_and_live_text_sound_alike_and_the_whole_text_layout_does_not() -> None:
    async with engine(str(HERE)) as (client, pid):
        assert pid > 0
        streamed = await speak(client, TEXT, "streamed", SEED, RATE, sounds := asyncio.Event())
        # Word by word at once, so that a machine which stands still for a moment breaks nothing off.
        live = await speak(client, TEXT, "live", SEED, 1e9, asyncio.Event())
        whole = await speak(client, TEXT, "whole", SEED, RATE, asyncio.Event())
    assert sounds.is_set() and streamed.first_s is not None and not streamed.ran_away
    assert 0.5 < len(streamed.audio) / SAMPLE_RATE < 3.0
    np.testing.assert_array_equal(live.audio, streamed.audio)
    assert not whole.ran_away and 0.5 < len(whole.audio) / SAMPLE_RATE < 3.0
    assert len(whole.audio) != len(streamed.audio) or not np.array_equal(whole.audio, streamed.audio)


async def test_text_that_comes_too_slowly_is_spoken_in_pieces_to_its_end() -> None:
    """And a runaway is none that merely was broken off."""
    async with engine(str(HERE)) as (client, _):
        slow = await speak(client, "Yes. No. Well, so it is.", "live", SEED, 5.0, asyncio.Event())
    assert slow.pieces > 1 and not slow.ran_away


def test_the_judge_adds_up_by_category() -> None:
    heard = iter(["He waved goodbye.", "Where is the the cat?"])
    judge = Judge(lambda audio: next(heard), "test")
    second = np.zeros(SAMPLE_RATE, np.float32)
    judge.hear(Sentence("conversational", TEXT), Spoken(second, first_s=0.05))
    judge.hear(Sentence("questions", "Where is the dog?"), Spoken(second, ran_away=True, first_s=0.15, pieces=2))
    assert {category: score.errors for category, score in judge.by_category.items()} == {"conversational": 0, "questions": 2}
    assert (judge.all.words, judge.all.runaways, judge.all.repetitions, judge.all.seconds) == (7, 1, 1, 2.0)
    assert "p50 100 ms" in (report := list(judge.report(engine_s=0.5)))[-1]
    assert "real-time factor 0.250; 3 utterances" in report[-1]


def test_silence_is_heard_as_nothing() -> None:
    judge = Judge(lambda audio: pytest.fail("nothing was spoken"), "test")
    judge.hear(Sentence("conversational", TEXT), Spoken(np.zeros(0, np.float32)))
    assert judge.all.missing == judge.all.words == 3
