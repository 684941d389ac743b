"""Live text at any speed, as a session drives it: what the engine leaves unspoken opens the next utterance."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch

from engine.messages import AudioChunk, Done, Finish, Sampling, Started
from engine.model.checkpoint import Checkpoint
from gateway.sender import TextRate
from tests.engine.test_loop import ME, World

TEXT = (
    "when the small model speaks slowly the quick brown fox jumps over the lazy dog and then one two three four five six seven "
    "eight nine ten people in the town begin to walk along the river until they see the old bridge and hear the bells"
)
WORDS = TEXT.split()
RATE = 24_000


class Gap(NamedTuple):
    """A listener who starts at once heard nothing for so long, before sample `position` of an utterance."""

    utterance: int
    position: int
    seconds: float


class Sender:
    """Sends `pieces` at their times; opens the next utterance with whatever the engine did not say. `rate`: its speed in characters
    a second where that is known from the start, None where it is measured, as a session does."""

    def __init__(self, world: World, pieces: list[tuple[float, str]], rate: float | None) -> None:
        self.world = world
        self.left = list(pieces)
        self.rate = rate
        self.measured = TextRate()
        self.number = 0
        self.text = ""
        self.spoken: list[str] = []
        self.gaps: list[Gap] = []
        self.seen = 0
        self.dry_s: float | None = None

    def open(self) -> None:
        self.number += 1
        self.world.open(self.number, max_frames=None, text_rate=self.rate or self.measured.chars_per_s, sampling=Sampling(seed=self.number))
        self.dry_s = None

    def run(self) -> None:
        world = self.world
        self.voice()
        self.open()
        for _ in range(200_000):
            while self.left and self.left[0][0] <= world.now_s:
                piece = self.left.pop(0)[1]
                self.text += piece
                self.measured.append(len(piece), world.now_s)
                world.append(self.number, piece)
                if not self.left:
                    world.loop.handle(ME, Finish(world.loop.epoch, self.number), world.now_s)
            wait_s = world.loop.turn(world.now_s)
            if self.look():
                return
            next_s = self.left[0][0] - world.now_s if self.left else 1.0
            world.now_s += 0.001 if wait_s == 0.0 else max(0.0005, min(next_s, 1.0 if wait_s is None else wait_s))
        raise AssertionError("the text was never spoken to its end")

    def voice(self) -> None:
        """Random weights end when they like; this voice ends ten frames after it may, and tells its frames apart."""
        stages = self.world.stages
        slots = stages.slots
        end_after: dict[int, int] = {}

        def end_soon(group: int, rows: list[int], tokens: torch.Tensor) -> torch.Tensor:
            if group == 0:
                for row, slot in enumerate(rows):
                    may = bool(slots.may_end[slot])
                    first = end_after.setdefault(slot, slots.steps[slot]) if may else end_after.pop(slot, 0)
                    tokens[row] = stages.talker_stage.codebook if may and slots.steps[slot] >= first + 10 else (7 * slots.steps[slot]) % 61
            return tokens

        stages.talker_stage.force = end_soon

    def look(self) -> bool:
        """Take the events that came; True when everything has been said."""
        events, self.seen = self.world.events[self.seen :], len(self.world.events)
        for event in events:
            if isinstance(event, AudioChunk):
                if self.dry_s is not None and self.world.now_s > self.dry_s + 0.002:
                    self.gaps.append(Gap(event.utterance, event.position, self.world.now_s - self.dry_s))
                self.dry_s = max(self.dry_s or 0.0, self.world.now_s) + len(event.pcm) / 2 / RATE
            elif isinstance(event, Done):
                self.spoken.append(self.text[: event.text_until])
                self.text = self.text[event.text_until :]
                if not self.text and not self.left:
                    return True
                self.open()
                self.world.append(self.number, self.text)
                if not self.left:
                    self.world.loop.handle(ME, Finish(self.world.loop.epoch, self.number), self.world.now_s)
        return False


def send(tiny: Checkpoint, tokens_per_s: float, *, pause_at: int | None = None, rate_known: bool = False) -> Sender:
    """The words one by one at so many tokens a second; a pause of three seconds before word `pause_at`."""
    at_s, pieces = 0.0, []
    for number, word in enumerate(WORDS):
        if number == pause_at:
            at_s += 3.0
        piece = word if number == 0 else " " + word
        pieces.append((at_s, piece))
        at_s += len(tiny.tokenizer.encode(piece)) / tokens_per_s
    text = " ".join(WORDS)
    tokens = len(tiny.tokenizer.encode(text))
    sender = Sender(World(tiny, slots=2, positions=1024), pieces, tokens_per_s * len(text) / tokens if rate_known else None)
    sender.run()
    return sender


def assert_every_word_once(sender: Sender) -> None:
    assert "".join(sender.spoken) == " ".join(WORDS)
    for part in sender.spoken:
        assert re.fullmatch(r"\s*\S+(\s+\S+)*\s*", part), part
        assert all(word in WORDS for word in part.split()), f"a word was cut: {part!r}"


@pytest.mark.parametrize("rate_known", [False, True])
@pytest.mark.parametrize("tokens_per_s", [5.0, 8.0, 20.0, 50.0])
def test_every_word_once_and_no_gap_inside_an_utterance(tiny: Checkpoint, tokens_per_s: float, rate_known: bool) -> None:
    sender = send(tiny, tokens_per_s, rate_known=rate_known)
    assert_every_word_once(sender)
    assert sender.gaps == []
    if tokens_per_s > 12.5:
        # A sender faster than speech is never cut into pieces.
        assert len(sender.spoken) == 1


@pytest.mark.parametrize("tokens_per_s", [8.0, 20.0, 50.0])
@pytest.mark.parametrize("pause_at", [3, 9, 20])
def test_a_pause_of_three_seconds_in_mid_sentence(tiny: Checkpoint, tokens_per_s: float, pause_at: int) -> None:
    sender = send(tiny, tokens_per_s, pause_at=pause_at)
    assert_every_word_once(sender)
    assert sender.gaps == []
    if tokens_per_s > 12.5:
        # The listener hears the pause between two utterances, at a word's end, or nothing of it where there was more to say; the
        # word before the pause may be said within it, when nothing has followed it for a while.
        assert len(sender.spoken) <= 3


def test_all_at_once_is_one_utterance(tiny: Checkpoint) -> None:
    sender = Sender(World(tiny, slots=2, positions=1024), [(0.0, " ".join(WORDS))], None)
    sender.run()
    assert sender.spoken == [" ".join(WORDS)] and sender.gaps == []


def test_the_first_words_of_a_slow_sender_wait_but_a_sentence_does_not(tiny: Checkpoint) -> None:
    world = World(tiny)
    pieces = [(0.3 * n, piece) for n, piece in enumerate(["Hello ", "there. ", "And ", "so ", "on."])]
    sender = Sender(world, pieces, 10.0)
    sender.run()
    assert any(isinstance(event, Started) for event in world.events)
    assert "".join(sender.spoken) == "Hello there. And so on."
    assert sender.spoken[0].startswith("Hello there.")


def test_a_last_word_with_nothing_behind_it_is_said_after_a_pause(tiny: Checkpoint) -> None:
    sender = Sender(World(tiny), [(0.0, "hel"), (0.1, "lo"), (4.0, " and more of it")], None)
    sender.run()
    assert sender.spoken == ["hello", " and more of it"]
    sender = Sender(World(tiny), [(0.0, "some bread and chee"), (0.1, "se"), (6.0, " too.")], None)
    sender.run()
    assert sender.spoken == ["some bread and", " cheese", " too."]
