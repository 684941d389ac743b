"""What arrived, read back by a recogniser: whether speech that was quick was speech at all. Only for voices that say English words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from engine.voice.judge import Recogniser, Score, Sentence
from gateway.bench.outcome import Outcome

RECOGNISER_RATE = 24_000


class NoRecogniser(Exception):
    """It is not installed; the message says how it is."""


class Heard(msgspec.Struct):
    """Word errors of what was recognised, from 0; substituted, missing and invented words count as one each."""

    wer: float
    words: int
    sentences: int
    wrong: int
    """Sentences with an error."""


class Judge:
    """Loads the recogniser. Raises NoRecogniser."""

    def __init__(self) -> None:
        try:
            self._recogniser = Recogniser()
        except ImportError as error:
            raise NoRecogniser(f"--judge needs the recogniser ({error.name} is missing); install it with: pip install -e '.[dev]'") from None

    def __call__(self, outcomes: Sequence[Outcome], pcm: Mapping[int, bytes], sample_rate: int) -> Heard:
        """Judge the requests that were answered."""
        score = Score()
        for outcome in outcomes:
            if outcome.status != "ok":
                continue
            sentence = Sentence("bench", outcome.text)
            samples = np.frombuffer(pcm[outcome.number][: len(pcm[outcome.number]) // 2 * 2], "<i2").astype(np.float32) / 32768.0
            if sample_rate != RECOGNISER_RATE:
                places = np.arange(0.0, len(samples) - 1, sample_rate / RECOGNISER_RATE)
                samples = np.interp(places, np.arange(len(samples)), samples).astype(np.float32)
            score.add(sentence.asked, sentence.heard(self._recogniser(samples)), outcome.audio_s, False)
        return Heard(score.rate, score.words, score.sentences, score.wrong)
