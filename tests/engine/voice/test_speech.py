"""The embedded voice through the engine's loop, understood by a recogniser: live text at any speed, pauses, and long texts."""

from __future__ import annotations

import numpy as np
import pytest

from engine.__main__ import EMBEDDED_VOICE
from engine.messages import AudioChunk
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.voice.judge import Recogniser, Score, Sentence
from tests.engine.test_live_speech import pieces_at
from tests.engine.test_live_text import Sender
from tests.engine.test_loop import World

LONG = (
    "The museum opens at ten in the morning and closes at six. On the ground floor you will find old maps and the tools of the people "
    "who drew them, with a short film about their work. One floor up there are paintings of the harbor, most of them by a man who never "
    "left the town. The guide told us that he painted the same window every day for thirty years. At the top there is a small room with "
    "a view over the roofs, and a book in which visitors may write. We stayed there until the rain had stopped. On the way out we bought "
    "two cards and a pencil, and the woman at the desk asked us to come again in the spring, when the garden behind the house is open."
)


class Said(Sender):
    """Speaks with the voice as it is."""

    def voice(self) -> None:
        pass

    def sound(self) -> np.ndarray:
        """All utterances, one behind the other, as floats at 24 kHz."""
        pcm = b"".join(event.pcm for event in self.world.events if isinstance(event, AudioChunk))
        return (np.frombuffer(pcm, np.int16) / 32768).astype(np.float32)


@pytest.fixture(scope="module")
def embedded() -> Checkpoint:
    return load_checkpoint(EMBEDDED_VOICE)


@pytest.fixture(scope="module")
def recogniser() -> Recogniser:
    return Recogniser()


def say(checkpoint: Checkpoint, pieces: list[tuple[float, str]]) -> Said:
    world = World(checkpoint, slots=1, positions=2048)
    world.loop.rehearse()
    said = Said(world, pieces, None)
    said.run()
    assert "".join(said.spoken) == "".join(piece for _, piece in pieces)
    return said


def wrong_words(recogniser: Recogniser, said: Said) -> tuple[float, str]:
    """The share of wrong words, and what was heard."""
    text = "".join(said.spoken)
    heard, score, sentence = recogniser(said.sound()), Score(), Sentence(text=text, category="long")
    score.add(sentence.asked, sentence.heard(heard), len(said.sound()) / 24_000, False)
    return score.rate, heard


@pytest.mark.parametrize("pause_at", [None, 14])
@pytest.mark.parametrize("tokens_per_s", [5.0, 8.0, 20.0, 50.0])
def test_live_text_is_understood(embedded: Checkpoint, recogniser: Recogniser, tokens_per_s: float, pause_at: int | None) -> None:
    said = say(embedded, pieces_at(embedded, tokens_per_s, pause_at))
    assert sum(gap.seconds for gap in said.gaps) < 0.2
    rate, heard = wrong_words(recogniser, said)
    # Four words of 48: pieces of two or three words, as a slow sender's are, leave a recogniser little to go by.
    assert rate <= 0.1, heard


def test_a_long_text_is_understood_to_its_end(embedded: Checkpoint, recogniser: Recogniser) -> None:
    said = say(embedded, [(0.0, LONG)])
    assert len(said.spoken) >= 2
    assert all(part.rstrip().endswith(".") for part in said.spoken), said.spoken
    rate, heard = wrong_words(recogniser, said)
    assert rate <= 0.05, heard
