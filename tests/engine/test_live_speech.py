"""Live text, and what is heard of it: a voice whose samples tell which word they belong to, fed at any speed.

The voice does what the model does (design 3.2a): it eats one text token a frame and speaks on, never waits, and ends once the text's end
has been eaten and all has been said. It says a word once it has it whole, and is silent until then."""

from __future__ import annotations

import re
from itertools import groupby

import numpy as np
import pytest

from engine.__main__ import EMBEDDED_VOICE
from engine.messages import AudioChunk
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.stages import Stages
from tests.engine.test_live_text import Sender
from tests.engine.test_loop import World

TEXT = (
    "It was late in the evening, and the last bus had gone. So they walked along the river, past the old mill and over the bridge; "
    "nobody spoke. When the town came into sight at last, with its lights and its noise, one of them began to laugh."
)
WORDS = TEXT.split()
FRAMES_A_CHARACTER = 0.9
SAMPLES = 1920
LOUDNESS = 300
"""So that the guard does not take it for silence."""


def frames_of(word: str) -> int:
    return max(1, round(len(word) * FRAMES_A_CHARACTER))


class TellingStages(Stages):
    """Frames of a word are filled with its number in the utterance, from 1; silence is 0."""

    def __init__(self, checkpoint: Checkpoint, config: object) -> None:
        super().__init__(checkpoint, config)  # type: ignore[arg-type]
        self.eaten: dict[int, list[int]] = {}
        self.frames: dict[int, list[int]] = {}

    def begin(self, *arguments: object, **options: object) -> tuple[int, int]:
        slot, pieces = super().begin(*arguments, **options)  # type: ignore[arg-type]
        self.eaten[slot], self.frames[slot] = [], []
        return slot, pieces

    def talker(self, rows: list[int]) -> list[int | None]:
        tokens: list[int | None] = []
        for slot in rows:
            step, frames = self.slots.steps[slot], self.frames[slot]
            self.eaten[slot].append(int(self.slots.text[slot, step]))
            whole = self.whole_words(slot)
            said = max(frames, default=0)
            if said and frames.count(said) < frames_of(whole[said - 1]):
                frames.append(said)
            elif said < len(whole):
                frames.append(said + 1)
            elif self.slots.may_end[slot]:
                tokens.append(None)
                continue
            else:
                frames.append(0)
            self.slots.steps[slot] += 1
            tokens.append(7 * step % 61)
        return tokens

    def whole_words(self, slot: int) -> list[str]:
        """Words eaten and followed by something; all of them once the text's end has been eaten."""
        config = self.checkpoint.config
        eaten = self.eaten[slot]
        words = self.checkpoint.tokenizer.decode([token for token in eaten if token not in (config.tts_eos, config.tts_pad)])
        return words.split() if config.tts_eos in eaten else words.split()[: len(re.findall(r"\S(?=\s)", words))]

    def predictor(self, rows: list[int]) -> None:
        pass

    def codec(self, rows: list[int], first: list[int], frames: int) -> list[np.ndarray | None]:
        return [LOUDNESS * np.repeat(np.array(self.frames[slot][at : at + frames], np.int16), SAMPLES) for slot, at in zip(rows, first, strict=True)]


class Listener(Sender):
    """Hears the words: how many frames of which, utterance by utterance."""

    def codes(self, number: int) -> list[int]:
        """What each frame of an utterance belongs to: a word's number from 1, or 0."""
        pcm = np.concatenate([np.frombuffer(e.pcm, np.int16) for e in self.world.events if isinstance(e, AudioChunk) and e.utterance == number])
        return (pcm[::SAMPLES] // LOUDNESS).tolist()  # type: ignore[no-any-return]

    def heard(self) -> list[tuple[str, int]]:
        return [
            (text.split()[code - 1], len(list(run)))
            for number, text in enumerate(self.spoken, 1)
            for code, run in groupby(self.codes(number))
            if code
        ]

    def torn_words(self) -> list[str]:
        """Words with a gap in them."""
        torn = []
        for gap in self.gaps:
            before, after = self.codes(gap.utterance)[gap.position // SAMPLES - 1 :][:2]
            if before == after and before:
                torn.append(self.spoken[gap.utterance - 1].split()[before - 1])
        return torn

    def voice(self) -> None:
        """Nothing is forced: TellingStages end by themselves."""


def listen(checkpoint: Checkpoint, pieces: list[tuple[float, str]], rate: float | None) -> Listener:
    world = World(checkpoint, slots=2, positions=1024, trim_onset=False)
    world.stages = TellingStages(checkpoint, world.loop.config)
    world.loop.stages = world.stages
    listener = Listener(world, pieces, rate)
    listener.run()
    return listener


def pieces_at(checkpoint: Checkpoint, tokens_per_s: float, pause_at: int | None) -> list[tuple[float, str]]:
    """The text token by token, as a language model sends it; three seconds of nothing before word `pause_at`."""
    at_s, pieces, words = 0.0, [], 0
    for token in checkpoint.tokenizer.encode(TEXT):
        piece = checkpoint.tokenizer.decode([token])
        words += piece.count(" ")
        if pause_at is not None and words == pause_at and " " in piece:
            at_s += 3.0
        pieces.append((at_s, piece))
        at_s += 1.0 / tokens_per_s
    assert "".join(piece for _, piece in pieces) == TEXT
    return pieces


def assert_heard_whole(listener: Listener) -> None:
    assert "".join(listener.spoken) == TEXT
    assert listener.heard() == [(word, frames_of(word)) for word in WORDS]
    assert listener.torn_words() == []
    # At the beginning of speech nobody has a buffer yet: a sender who stumbles there is heard to do so.
    assert sum(gap.seconds for gap in listener.gaps) < 0.2


@pytest.fixture(scope="module", params=["tiny", "embedded"])
def checkpoint(request: pytest.FixtureRequest, tiny: Checkpoint) -> Checkpoint:
    """Two tokenizers: one and a half and two characters a token."""
    return tiny if request.param == "tiny" else load_checkpoint(EMBEDDED_VOICE)


@pytest.mark.parametrize("rate_known", [False, True])
@pytest.mark.parametrize("tokens_per_s", [5.0, 8.0, 20.0, 50.0])
def test_every_word_is_heard_once_and_whole(checkpoint: Checkpoint, tokens_per_s: float, rate_known: bool) -> None:
    rate = tokens_per_s * len(TEXT) / len(checkpoint.tokenizer.encode(TEXT)) if rate_known else None
    listener = listen(checkpoint, pieces_at(checkpoint, tokens_per_s, None), rate)
    assert_heard_whole(listener)
    assert listener.gaps == []
    if tokens_per_s > 12.5:
        assert len(listener.spoken) == 1


@pytest.mark.parametrize("tokens_per_s", [5.0, 8.0, 20.0, 50.0])
@pytest.mark.parametrize("pause_at", [2, 6, 17, 30])
def test_every_word_is_heard_once_and_whole_around_a_pause_in_mid_sentence(checkpoint: Checkpoint, tokens_per_s: float, pause_at: int) -> None:
    assert_heard_whole(listen(checkpoint, pieces_at(checkpoint, tokens_per_s, pause_at), None))
