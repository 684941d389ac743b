"""EngineLoop in-process, on the tiny checkpoint: what a client sees, what the trace shows, what is left behind."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import LATENCY
from engine.errors import DeviceLost
from engine.flight import TraceEntry
from engine.loop import EngineLoop
from engine.messages import (
    Append,
    AudioChunk,
    Cancel,
    Command,
    Credit,
    Done,
    Event,
    Failed,
    Finish,
    Hello,
    Open,
    Playback,
    Sampling,
    SpeechRequest,
    Started,
    Welcome,
)
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.model.prompt import AUTO, build_prefix, whole_text_body
from engine.onset import OnsetTrim
from engine.request import Utterance
from engine.scheduler import Stage
from engine.stages import Stages
from tests.conftest import FIXTURES

ME, OTHER = b"client", b"other"
TEXT = "the quick brown fox jumps over the lazy dog. one two three"
CONFIG = replace(LATENCY, slots=8, positions=256)


@pytest.fixture(scope="session")
def vd() -> Checkpoint:
    """A VoiceDesign shape in miniature: it takes instructions."""
    return load_checkpoint(FIXTURES / "checkpoints" / "vd17")


@dataclass
class Late:
    """A launch that is said to be done only after having been asked `left` times."""

    pending: Any
    left: int
    seconds: float = 0.001

    def done(self) -> bool:
        self.left -= 1
        return self.left < 0

    def result(self) -> Any:
        return self.pending.result()


class LateStages(Stages):
    """Two launches under way at once, as on a GPU."""

    depth = 2

    def launch(self, stage: Stage, slots: list[int], first: list[int], frames: int) -> Any:
        return Late(super().launch(stage, slots, first, frames), 3)


class EndingStages(LateStages):
    """And speech ends in one of 25 steps."""

    chance = random.Random(0)

    def talker(self, rows: list[int]) -> list[int | None]:
        return [None if self.chance.random() < 0.04 else token for token in super().talker(rows)]


class World:
    """A loop with a clock that moves only when told, and the events it sent."""

    def __init__(self, checkpoint: Checkpoint, kind: type[Stages] = Stages, **changes: object) -> None:
        config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.events: list[Event] = []
        self.stages = kind(checkpoint, config)
        self.loop = EngineLoop(self.stages, config, lambda client, event: self.events.append(event), lambda: self.now_s)
        self.watch()

    def watch(self) -> None:
        self._awake = self.loop._resting.awake
        self.loop._resting.awake = self.awake  # type: ignore[method-assign]

    def awake(self, now_s: float) -> list[Utterance]:
        """Who is, once it is clear that nobody rests for whom something would be done, and that what is known of the others holds."""
        scheduler, ahead_s, streams = self.loop.scheduler, self.loop.config.ahead_s, len(self.loop._active)
        awake = self._awake(now_s)
        known = scheduler.survey(now_s, awake, ahead_s, streams)
        everyone = [voice.utterance for voice in self.loop._active.values()]
        found = [u.work for u in everyone]
        for u in everyone:
            u.work = None
        fresh = scheduler.survey(now_s, everyone, ahead_s, streams)
        for u, work in zip(everyone, found, strict=True):
            u.work = work
        assert all(item.due_s > now_s + 0.9 * ahead_s for item in fresh if item.utterance not in awake), "somebody rests who needs something"
        assert {item.utterance: item[:-2] for item in known} == {item.utterance: item[:-2] for item in fresh if item.utterance in awake}
        return awake

    def open(self, number: int, text: str | None = None, *, finish: bool = True, client: bytes = ME, **fields: object) -> None:
        self.loop.handle(client, Open(self.loop.epoch, number, SpeechRequest(**{"max_frames": 12, **fields})), self.now_s)  # type: ignore[arg-type]
        if text is not None:
            self.append(number, text)
            if finish:
                self.loop.handle(client, Finish(self.loop.epoch, number), self.now_s)

    def append(self, number: int, text: str) -> None:
        self.loop.handle(ME, Append(self.loop.epoch, number, text), self.now_s)

    def run(self, seconds: float = 30.0) -> None:
        """Turn until nothing is left or `seconds` have passed; a launch takes a millisecond."""
        end_s = self.now_s + seconds
        while not self.loop.idle and self.now_s < end_s:
            wait_s = self.loop.turn(self.now_s)
            self.now_s += 0.001 if wait_s == 0.0 else (end_s if wait_s is None else wait_s)

    def done(self, number: int) -> Done:
        event = self.last(number)
        assert isinstance(event, Done), event
        return event

    def pcm(self, number: int) -> np.ndarray:
        chunks = [event for event in self.events if isinstance(event, AudioChunk) and event.utterance == number]
        position = 0
        for chunk in chunks:
            assert chunk.position == position
            position += len(chunk.pcm) // 2
        return np.frombuffer(b"".join(chunk.pcm for chunk in chunks), np.int16)

    def last(self, number: int) -> Event:
        return [event for event in self.events if not isinstance(event, Welcome) and event.utterance == number][-1]


def test_one_utterance(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.open(1, "one two three")
    world.run()
    assert isinstance(world.events[0], Started)
    done = world.last(1)
    assert isinstance(done, Done) and done.reason in ("end", "length") and done.text_until == 13
    assert len(world.pcm(1)) == done.samples > 0
    assert world.stages.free_slots == CONFIG.slots and world.loop.idle


def test_eight_at_once_share_launches_of_every_kind_and_all_complete(tiny: Checkpoint) -> None:
    world = World(tiny)
    for number in range(8):
        world.open(number, "the quick brown fox jumps over the lazy dog.", sampling=Sampling(seed=number))
    world.run()
    for number in range(8):
        assert isinstance(world.last(number), Done)
    for stage in (Stage.TALKER, Stage.PREDICTOR, Stage.CODEC):
        launches = [entry for entry in world.loop.trace if entry.stage is stage]
        assert max(len(entry.rows) for entry in launches) == 8
        # Those who had not sounded went first: until all have, no launch is without one.
        firsts = [index for index, entry in enumerate(launches) if entry.silent]
        assert firsts == list(range(len(firsts)))


def test_a_newcomer_joins_the_running_batch_and_is_served_first(tiny: Checkpoint) -> None:
    world = World(tiny, chunk_frames=(1,))
    for number in range(3):
        world.open(number, "the quick brown fox jumps over the lazy dog", sampling=Sampling(seed=number))
    while not all(len([e for e in world.events if isinstance(e, AudioChunk) and e.utterance == n]) > 1 for n in range(3)):
        world.loop.turn(world.now_s)
        world.now_s += 0.001
    mark = len(world.loop.trace)
    world.open(7, "ten nine eight", sampling=Sampling(seed=7))
    world.run()
    fresh = list(world.loop.trace)[mark:]
    first_sound = next(i for i, entry in enumerate(fresh) if entry.stage is Stage.CODEC and 7 in entry.rows)
    path = [entry for entry in fresh[: first_sound + 1] if 7 in entry.rows]
    assert [entry.stage for entry in path] == [Stage.TALKER, Stage.PREDICTOR, Stage.CODEC]
    assert path[0].rows[0] == 7 and len(path[0].rows) > 1


def test_text_token_by_token_gives_the_same_samples_as_at_once(tiny: Checkpoint) -> None:
    text = "one two three four five"
    whole, typed = World(tiny), World(tiny)
    fields = {"sampling": Sampling(greedy=True), "live": False}
    whole.open(1, text, **fields)
    whole.run()
    typed.open(1, **fields)
    for character in text:
        typed.append(1, character)
        typed.run(0.01)
    typed.loop.handle(ME, Finish(typed.loop.epoch, 1), typed.now_s)
    typed.run()
    assert np.array_equal(whole.pcm(1), typed.pcm(1))


def test_live_text_never_ends_before_its_text(tiny: Checkpoint) -> None:
    """End of speech is masked until the text has ended, whatever the model would like."""
    world = World(tiny)
    world.open(1, "the quick brown fox jumps over the lazy dog. ", finish=False, text_rate=500.0, max_frames=100)
    world.run(0.05)
    issued = [entry for entry in world.loop.trace if entry.stage is Stage.TALKER]
    assert issued and not any(isinstance(event, Done) for event in world.events)


def test_a_sender_who_pauses_is_spoken_up_to_the_last_word_and_told_so(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.open(1, "ten nine. And th", finish=False, max_frames=100, sampling=Sampling(seed=1))
    world.run()
    done = world.last(1)
    assert isinstance(done, Done) and done.reason == "idle"
    assert done.text_until == len("ten nine. And")


def test_blank_text_is_done_without_sound(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.open(1, " \n ")
    assert world.last(1) == Done(world.loop.epoch, 1, "empty", 0, 3)
    world.open(2, " ", live=False)
    assert world.last(2) == Done(world.loop.epoch, 2, "empty", 0, 1)
    world.open(3)
    world.loop.handle(ME, Finish(world.loop.epoch, 3), 0.0)
    assert world.last(3) == Done(world.loop.epoch, 3, "empty", 0, 0)
    assert world.loop.idle


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
def test_cancel_at_any_moment_frees_everything(tiny: Checkpoint, turns: int) -> None:
    world = World(tiny)
    world.open(1, "one two three")
    for _ in range(turns):
        world.loop.turn(world.now_s)
    world.loop.handle(ME, Cancel(world.loop.epoch, 1), world.now_s)
    done = world.last(1)
    assert isinstance(done, Done) and done.reason == "cancelled"
    world.loop.handle(ME, Cancel(world.loop.epoch, 1), world.now_s)
    world.run()
    assert world.last(1) is done
    assert world.stages.free_slots == CONFIG.slots and world.loop.idle


def test_more_utterances_than_slots_wait_their_turn(tiny: Checkpoint) -> None:
    world = World(tiny, slots=2)
    for number in range(5):
        world.open(number, "one two", sampling=Sampling(seed=1))
    world.run()
    assert [event.utterance for event in world.events if isinstance(event, Started)] == [0, 1, 2, 3, 4]
    assert all(isinstance(world.last(number), Done) for number in range(5))


def test_a_full_waiting_room_refuses_and_says_to_come_back(tiny: Checkpoint) -> None:
    world = World(tiny, slots=1, waiting=2)
    for number in range(4):
        world.open(number, "one two three", max_frames=100)
        world.loop.turn(world.now_s)
    # One is spoken, two wait, and the fourth is too many.
    failed = world.last(3)
    assert isinstance(failed, Failed) and failed.code == "overloaded" and failed.retryable and failed.retry_after_s
    assert all(not isinstance(event, Failed) for event in world.events if event is not failed)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"voice": "bob"}, "unknown_voice", "serena, vivian"),
        ({"language": "klingon"}, "unknown_language", "english"),
        ({"language": "sichuan_dialect"}, "unknown_language", "chinese"),
        ({"sampling": Sampling(temperature=0.0)}, "invalid_request", "temperature"),
        ({"sampling": Sampling(top_p=1.5)}, "invalid_request", "top_p"),
        ({"sampling": Sampling(top_k=0)}, "invalid_request", "top_k"),
        ({"sampling": Sampling(repetition_penalty=0.5)}, "invalid_request", "repetition_penalty"),
        ({"sampling": Sampling(seed=-1)}, "invalid_request", "seed"),
        ({"pace": "warp"}, "invalid_request", "pace"),
        ({"instructions": "speak slowly " * 200}, "invalid_request", "instructions"),
    ],
)
def test_what_cannot_be_spoken_is_refused_by_field(tiny: Checkpoint, fields: dict[str, object], code: str, words: str) -> None:
    world = World(tiny)
    world.open(1, "hello", **fields)
    failed = world.last(1)
    assert isinstance(failed, Failed) and failed.code == code and words in failed.message and not failed.retryable
    world.open(2, "hello")
    world.run()
    assert isinstance(world.last(2), Done)


def test_text_beyond_the_limit_is_refused(tiny: Checkpoint) -> None:
    world = World(tiny, max_text_chars=100)
    world.open(1, "x" * 60, finish=False)
    world.append(1, "y" * 60)
    failed = world.last(1)
    assert isinstance(failed, Failed) and failed.code == "text_too_long" and "100" in failed.message
    assert world.loop.idle


def test_another_epoch_is_refused(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.loop.handle(ME, Hello(), 0.0)
    assert isinstance(world.events[0], Welcome) and world.events[0].epoch == world.loop.epoch
    world.loop.handle(ME, Open(world.loop.epoch + 1, 4, SpeechRequest()), 0.0)
    failed = world.last(4)
    assert isinstance(failed, Failed) and failed.code == "engine_unavailable" and failed.retryable


def test_commands_for_ended_utterances_do_nothing(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.open(1, "one")
    world.run()
    count = len(world.events)
    for command in (
        Append(world.loop.epoch, 1, "x"),
        Finish(world.loop.epoch, 1),
        Playback(world.loop.epoch, 1, 5, True, False),
        Credit(world.loop.epoch, 1, 5),
    ):
        world.loop.handle(ME, command, world.now_s)
    assert len(world.events) == count


def test_a_client_that_left_leaves_nothing(tiny: Checkpoint) -> None:
    world = World(tiny)
    for number in range(3):
        world.open(number, "one two three", client=ME if number else b"other", finish=False)
    world.loop.turn(world.now_s)
    world.loop.drop_client(ME)
    world.loop.drop_client(b"other")
    assert world.loop.idle and world.stages.free_slots == CONFIG.slots


def test_a_launch_that_breaks_fails_its_own_rows_only(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tiny)
    world.open(1, "one two three")
    intact = world.stages.predictor

    def broken(rows: list[int]) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(world.stages, "predictor", broken)
    world.run()
    failed = world.last(1)
    assert isinstance(failed, Failed) and failed.code == "utterance_failed" and failed.retryable
    monkeypatch.setattr(world.stages, "predictor", intact)
    world.open(2, "one two three")
    world.run()
    assert isinstance(world.last(2), Done)
    assert world.stages.free_slots == CONFIG.slots


def test_a_result_that_breaks_fails_its_own_rows_only(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tiny)
    world.open(1, "one two three")

    def broken(trim: OnsetTrim, samples: np.ndarray) -> np.ndarray:
        raise ValueError("no such samples")

    with monkeypatch.context() as patch:
        patch.setattr(OnsetTrim, "push", broken)
        world.run()
    failed = world.last(1)
    assert isinstance(failed, Failed) and failed.code == "utterance_failed" and failed.retryable
    world.open(2, "one two three")
    world.run()
    assert isinstance(world.last(2), Done)
    assert world.stages.free_slots == CONFIG.slots


def test_a_device_that_is_lost_ends_the_engine(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail whoever comes, and only a new process can use it again."""
    world = World(tiny)
    world.open(1, "one two three")

    def lost(rows: list[int]) -> None:
        raise DeviceLost("an illegal memory access was encountered")

    monkeypatch.setattr(world.stages, "predictor", lost)
    with pytest.raises(DeviceLost):
        world.run()


def test_a_slot_used_before_gives_the_same_samples(tiny: Checkpoint) -> None:
    """Nothing of an earlier utterance is left in its slot."""
    fresh, used = World(tiny, slots=1), World(tiny, slots=1)
    used.open(1, "the quick brown fox jumps", sampling=Sampling(seed=3))
    used.run()
    for world in (fresh, used):
        world.open(2, "ten nine", sampling=Sampling(seed=4))
        world.run()
    assert np.array_equal(fresh.pcm(2), used.pcm(2))


def test_the_frame_cap_ends_speech_with_its_reason(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.loop.handle(ME, Open(world.loop.epoch, 1, SpeechRequest(max_frames=3)), 0.0)
    world.append(1, "the quick brown fox jumps over the lazy dog ")
    world.run(0.1)
    done = world.last(1)
    assert isinstance(done, Done) and (done.reason, done.samples) == ("length", 3 * 1920)
    assert 0 < done.text_until < 20


def test_a_voice_that_never_ends_is_ended(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """End of speech is never drawn: the frame cap of the text ends it, with its reason."""
    world = World(tiny)
    monkeypatch.setattr(world.stages, "allow_end", lambda slot: None)
    world.open(1, "ten", max_frames=None)
    world.run()
    assert world.done(1).reason == "runaway"
    assert 4.0 < world.done(1).samples / 24000 < 8.0


def test_a_loop_of_tokens_is_ended(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tiny)
    monkeypatch.setattr(world.stages, "talker", lambda rows: [5 for slot in rows])
    world.open(1, "the quick brown fox jumps over the lazy dog " * 5, max_frames=None)
    world.run()
    assert world.done(1).reason == "repetition"


def test_endless_silence_is_ended(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tiny)
    monkeypatch.setattr(world.stages, "allow_end", lambda slot: None)
    monkeypatch.setattr(world.stages, "codec", lambda rows, first, frames: [np.zeros(1920 * frames, np.int16) for _ in rows])
    world.open(1, "the quick brown fox jumps over the lazy dog " * 5, max_frames=None)
    world.run()
    assert world.done(1).reason == "silence"


@pytest.mark.parametrize("stage", ["talker", "codec"])
def test_what_is_not_a_number_fails_its_row_only(tiny: Checkpoint, stage: str) -> None:
    world = World(tiny)
    world.open(1, "one two three", sampling=Sampling(seed=1))
    world.open(2, "one two three", sampling=Sampling(seed=1))
    world.loop.turn(world.now_s)
    slots = world.stages.slots
    spoiled = slots.frame_sum if stage == "talker" else slots.codec[0]
    for _ in range(3):
        spoiled[0] = float("nan")
        world.loop.turn(world.now_s)
    world.run()
    failed = world.last(1)
    assert isinstance(failed, Failed) and failed.retryable and "not a number" in failed.message
    assert world.done(2).samples > 0


def test_silence_before_speech_is_not_sent(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tiny)
    whole = world.stages.codec

    def quiet_at_first(rows: list[int], first: list[int], frames: int) -> list[np.ndarray | None]:
        out = whole(rows, first, frames)
        for start, samples in zip(first, out, strict=True):
            assert samples is not None
            samples[: max(0, 3 - start) * 1920] = 0
        return out

    monkeypatch.setattr(world.stages, "codec", quiet_at_first)
    world.open(1, "the quick brown fox jumps over the lazy dog", sampling=Sampling(seed=2))
    world.run()
    pcm = world.pcm(1)
    first_loud = int(np.flatnonzero(np.abs(pcm) > 300)[0])
    assert len(pcm) < 12 * 1920 - 2 * 1920 and first_loud <= 0.04 * 24000


def slow_world(checkpoint: Checkpoint, frame_s: float, **changes: object) -> World:
    """A loop whose Talker takes `frame_s` a launch, whatever the batch, and everything else nothing."""
    world = World(checkpoint, **changes)
    for rows in CONFIG.buckets:
        for stage in Stage:
            for frames in (1, 2, 4, 8):
                world.stages.costs.record(stage, rows, frames, frame_s * rows if stage is Stage.TALKER else 1e-6)
    launch = world.stages.talker

    def talker(rows: list[int]) -> list[int | None]:
        world.now_s += frame_s * len(rows)
        return launch(rows)

    world.stages.talker = talker  # type: ignore[method-assign]
    return world


def test_an_utterance_for_which_somebody_would_run_dry_waits_and_is_refused_in_the_end(tiny: Checkpoint) -> None:
    """Each stream needs 45 % of the device: two fit, the third must wait, and is told when to come back."""
    world = slow_world(tiny, 0.036, longest_wait_s=1.0)
    for number in (1, 2, 3):
        world.open(number, "the quick brown fox jumps over the lazy dog " * 8, max_frames=100, live=True, sampling=Sampling(seed=number))
        world.run(0.5)
    started = [event.utterance for event in world.events if isinstance(event, Started)]
    assert started == [1, 2]
    world.run(1.5)
    failed = world.last(3)
    assert isinstance(failed, Failed) and failed.code == "overloaded" and failed.retryable
    assert failed.retry_after_s is not None and 1.0 <= failed.retry_after_s <= 30.0 and "try again in about" in failed.message
    world.run(60.0)
    assert world.done(1).samples > 0 and world.done(2).samples > 0


def test_whoever_waited_starts_when_there_is_room(tiny: Checkpoint) -> None:
    world = slow_world(tiny, 0.036, longest_wait_s=60.0)
    for number in (1, 2, 3):
        world.open(number, "one two three", sampling=Sampling(seed=number))
    world.run(120.0)
    assert [event.utterance for event in world.events if isinstance(event, Started)] == [1, 2, 3]
    assert world.done(3).samples > 0


def test_a_download_is_admitted_at_once(tiny: Checkpoint) -> None:
    world = slow_world(tiny, 0.036)
    for number in (1, 2):
        world.open(number, "the quick brown fox " * 8, max_frames=60, sampling=Sampling(seed=number))
    world.run(0.5)
    world.open(3, "one two three", live=False, pace="file")
    world.loop.turn(world.now_s)
    assert isinstance(world.last(3), Started)


def test_whole_text_speaks_what_the_reference_layout_does(tiny: Checkpoint) -> None:
    """The request against the path that `conform` holds against the goldens, and the text in pieces against the text at once."""
    text = "the quick brown fox jumps over the lazy dog"
    greedy = Sampling(greedy=True)
    asked, pieces, known = World(tiny, trim_onset=False), World(tiny, trim_onset=False, prefill_rows=3), World(tiny, trim_onset=False)
    asked.open(1, text, whole_text=True, sampling=greedy)
    asked.run()
    pieces.open(1, whole_text=True, live=True, sampling=greedy)
    for piece in ("the quick bro", "wn fox", " jumps over the lazy dog"):
        pieces.append(1, piece)
        pieces.run(0.5)
    assert pieces.pcm(1).size == 0, "nothing is said before the text has ended"
    pieces.loop.handle(ME, Finish(pieces.loop.epoch, 1), pieces.now_s)
    pieces.run()

    config, tokenizer = tiny.config, tiny.tokenizer
    head, target = tokenizer.target(text)
    prefix = build_prefix(config, tokenizer, voice=None, language=AUTO, instructions="", head=head, whole_text=True)
    voice = known.loop.open_tokens(1, prefix, whole_text_body(config, target), greedy, 12, 0.0)
    voice.utterance.text_closed = True
    known.run()
    assert voice.utterance.complete and known.pcm(1).size > 0
    assert np.array_equal(asked.pcm(1), known.pcm(1))
    # In other pieces a prompt rounds otherwise, so the last bit of a sample may differ.
    assert np.abs(pieces.pcm(1).astype(int) - known.pcm(1)).max() <= 2
    assert asked.done(1).text_until == len(text) and asked.stages.free_slots == CONFIG.slots
    streamed = World(tiny, trim_onset=False)
    streamed.open(1, text, sampling=greedy)
    streamed.run()
    assert not np.array_equal(streamed.pcm(1), asked.pcm(1)), "the layouts are not the same"


def test_frames_per_char_caps_either_layout(tiny: Checkpoint) -> None:
    for whole_text in (False, True):
        world = World(tiny, trim_onset=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.stages.checkpoint, "config", replace(tiny.config, generation=replace(tiny.config.generation, frames_per_char=0.5)))
            world.stages.talker_stage.force = lambda group, rows, tokens: tokens.fill_(3) if group == 0 else tokens
            world.open(1, "one two three", whole_text=whole_text, max_frames=None)
            world.run()
        assert (world.done(1).reason, len(world.pcm(1))) == ("end", round(0.5 * 13) * 1920)


def test_whole_text_longer_than_half_a_slot_goes_on_in_the_next_utterance(tiny: Checkpoint) -> None:
    world = World(tiny)
    text = "one two three. " * 20
    world.open(1, text, whole_text=True, max_frames=None)
    world.run()
    done = world.done(1)
    assert done.reason == "length" and 0 < done.text_until < len(text) and text[: done.text_until].endswith(". ")


def test_a_long_prompt_is_put_in_between_the_frames_of_those_who_are_heard(vd: Checkpoint) -> None:
    world = World(vd, prefill_rows=4, positions=512, ahead_s=0.3)
    world.open(1, "the quick brown fox jumps over the lazy dog", instructions="calm", max_frames=60)
    for _ in range(40):
        world.loop.turn(world.now_s)
        world.now_s += 0.02
    assert world.pcm(1).size
    mark = len(world.loop.trace)
    world.open(2, "one two three", instructions="a low and steady voice, " * 12, max_frames=5)
    for _ in range(400):
        world.loop.turn(world.now_s)
        world.now_s += 0.02
    fresh = list(world.loop.trace)[mark:]
    pieces = [index for index, entry in enumerate(fresh) if entry.stage is Stage.PREFILL]
    assert len(pieces) > 20 and all(fresh[index].rows == (2,) for index in pieces)
    between = fresh[pieces[0] : pieces[-1]]
    assert any(1 in entry.rows for entry in between), "the listener of the first waits for the whole prompt of the second"
    assert isinstance(world.last(2), Done)


def test_utterances_that_wait_for_text_are_not_in_the_queue_for_room(tiny: Checkpoint) -> None:
    world = World(tiny, waiting=2)
    for number in range(1, 9):
        world.open(number, finish=False)
    world.open(20, "one two three")
    world.run(5.0)
    assert isinstance(world.last(20), Done), "it waits behind those who have nothing to say yet"
    for number in range(30, 54):
        world.open(number, finish=False)
    world.open(60, finish=False)
    refusal = world.last(60)
    assert isinstance(refusal, Failed) and refusal.code == "overloaded" and refusal.retry_after_s


def test_words_behind_what_cannot_be_said_are_left_for_the_next_utterance(tiny: Checkpoint) -> None:
    world = World(tiny)
    text = "\U0001f642" * 400 + " one two three"
    world.open(1, text)
    world.run()
    done = world.done(1)
    assert (done.reason, done.samples) == ("length", 0) and 0 < done.text_until < len(text)


def test_newcomers_with_the_same_unknown_prompt_compute_it_once(vd: Checkpoint) -> None:
    world = World(vd, prefill_rows=2)
    for number in (1, 2):
        world.open(number, "one two three", instructions="a low and steady voice", sampling=Sampling(greedy=True))
    world.run()
    pieces = [entry.rows[0] for entry in world.loop.trace if entry.stage is Stage.PREFILL]
    assert len(pieces) < 1.5 * pieces.count(1) and np.array_equal(world.pcm(1), world.pcm(2))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_when_everything_is_freed_and_everyone_answered_once(vd: Checkpoint, data: st.DataObject) -> None:
    """Opens, cancels, reports and a client that leaves, in any order and at any moment, prompts half computed among them."""
    draw = data.draw
    slots = draw(st.sampled_from([1, 2, 4]))
    world = World(vd, slots=slots, prefill_rows=draw(st.sampled_from([1, 4, 16])), longest_wait_s=0.5)
    opened, others = 0, 1000
    for action in draw(st.lists(st.sampled_from(["open", "cancel", "heard", "append", "other", "leave", *["turn"] * 6]), max_size=80)):
        number = draw(st.integers(1, max(1, opened)))
        if action == "open":
            opened += 1
            fields = {
                "instructions": draw(st.sampled_from(["", "calm", "a low and steady voice, " * 4])),
                "pace": draw(st.sampled_from(["live", "file"])),
                "whole_text": draw(st.booleans()),
                "max_frames": draw(st.integers(1, 20)),
                "sampling": Sampling(seed=opened),
            }
            world.open(opened, TEXT[: draw(st.integers(1, len(TEXT)))], finish=draw(st.booleans()), **fields)
        elif action == "cancel":
            world.loop.handle(ME, Cancel(world.loop.epoch, number), world.now_s)
        elif action == "heard":
            world.loop.handle(ME, Playback(world.loop.epoch, number, draw(st.integers(-5, 50_000)), draw(st.booleans()), True), world.now_s)
        elif action == "append":
            world.append(number, " more")
        elif action == "other":
            others += 1
            world.open(others, client=OTHER, instructions=draw(st.sampled_from(["", "loud " * 9])), max_frames=20)
            world.loop.handle(OTHER, Append(world.loop.epoch, others, TEXT), world.now_s)
            world.loop.handle(OTHER, Finish(world.loop.epoch, others), world.now_s)
        elif action == "leave":
            world.loop.drop_client(OTHER)
            assert not any(client == OTHER for client, _ in (*world.loop._active, *world.loop._waiting))
        else:
            wait_s = world.loop.turn(world.now_s)
            world.now_s += 0.001 if wait_s == 0.0 else min(wait_s or 0.05, 0.3)
    for number in range(1, opened + 1):
        world.loop.handle(ME, Finish(world.loop.epoch, number), world.now_s)
    world.run(120.0)
    assert world.loop.idle and world.stages.free_slots == slots and not world.stages._prompts
    assert sorted(world.stages.slots._free) == list(range(slots))
    for number in range(1, opened + 1):
        own = [event for event in world.events if getattr(event, "utterance", None) == number]
        assert [type(event) for event in own if isinstance(event, Done | Failed)] == [type(own[-1])]
        assert sum(isinstance(event, Started) for event in own) <= 1
        last = own[-1]
        assert not isinstance(last, Done) or last.samples == len(world.pcm(number))
    known = set(world.stages.prefixes._known)
    for number, prefix in enumerate(known, 2000):
        # What is kept was computed whole: an utterance that uses it sounds as one in a new world.
        fresh, again = World(vd), world
        for each in (fresh, again):
            each.loop.open_tokens(number, prefix, (), Sampling(greedy=True), 3, each.now_s, text=[5, 6, 7], last=True)
            each.run(5.0)
        assert np.array_equal(fresh.pcm(number), again.pcm(number))


@pytest.mark.parametrize("kind", [Stages, LateStages, EndingStages])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_known_of_an_utterance_holds_whatever_happens_to_it(vd: Checkpoint, seed: int, kind: type[Stages]) -> None:
    """`World.awake` looks at each turn: nobody rests who needs something, and nothing known is out of date."""
    chance = random.Random(seed)
    w = World(vd, kind, ahead_s=0.4, credit_s=0.8, slots=4, prefill_rows=8)
    opened = 0
    for _ in range(600):
        what = chance.choices(["turns", "wait", "report", "credit", "append", "finish", "open", "wrong"], [60, 8, 12, 8, 6, 2, 12, 6])[0]
        if what == "turns":
            for _ in range(chance.randrange(1, 8)):
                w.loop.turn(w.now_s)
                w.now_s += 0.001
        elif what == "wait":
            w.now_s += chance.choice([0.01, 0.1, 0.5])
        elif what == "open" and len(w.loop._active) + len(w.loop._waiting) < 4:
            opened += 1
            fields = {"pace": chance.choice(["live", "live", "file"]), "max_frames": 60, "instructions": chance.choice(["", "calm and slow, " * 8])}
            w.open(opened, TEXT, finish=chance.random() < 0.3, **fields)
        elif w.loop._active:
            voice = chance.choice(list(w.loop._active.values()))
            u, epoch = voice.utterance, w.loop.epoch
            if what == "wrong" and voice.guard is not None:
                voice.guard.verdict = "silence"
                continue
            command: Command = Append(epoch, u.number, " four five")
            if what == "report":
                command = Playback(epoch, u.number, round(chance.random() * u.samples_emitted), chance.random() < 0.7, True)
            elif what == "credit":
                command = Credit(epoch, u.number, chance.randint(u.samples_consumed, max(u.samples_consumed, u.samples_emitted)))
            elif what == "finish":
                command = Finish(epoch, u.number)
            w.loop.handle(ME, command, w.now_s)
    assert opened > 3


def test_rows_of_the_talker_go_on_to_the_code_predictor_at_once(vd: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say what they say when each launch is chosen by itself."""

    def said(looks: bool) -> tuple[list[bytes], list[TraceEntry]]:
        if looks:
            monkeypatch.setattr(EngineLoop, "_following", lambda self: None)
        w = World(vd, LateStages)
        for number in range(4):
            w.open(number, TEXT, sampling=Sampling(seed=number))
        w.run()
        return [w.pcm(number).tobytes() for number in range(4)], list(w.loop.trace)

    together, trace = said(looks=False)
    apart, _ = said(looks=True)
    assert together == apart and all(apart)
    for entry, following in itertools.pairwise(trace):
        if entry.stage is Stage.TALKER and len(entry.rows) >= 4:
            assert (following.stage, following.rows) == (Stage.PREDICTOR, entry.rows)
    assert sum(entry.stage is Stage.TALKER and len(entry.rows) >= 4 for entry in trace) > 5


@pytest.mark.parametrize(("paired_rows", "first"), [(64, Stage.TALKER), (1, Stage.PREDICTOR)])
def test_somebody_new_goes_before_the_code_predictor_of_few_others(
    vd: Checkpoint, monkeypatch: pytest.MonkeyPatch, paired_rows: int, first: Stage
) -> None:
    monkeypatch.setattr("engine.loop.PAIRED_ROWS", paired_rows)
    w = World(vd, LateStages)
    w.open(0, TEXT, sampling=Sampling(seed=0))
    while not (w.pcm(0).size and w.loop._flights and w.loop._flights[-1].launch.stage is Stage.TALKER):
        w.run(0.0005)
    launched = len(w.loop.trace) + len(w.loop._flights)
    w.open(1, TEXT, sampling=Sampling(seed=1))
    w.run()
    entry = w.loop.trace[launched]
    assert entry.stage is first
    assert (1 in entry.rows) == (first is Stage.TALKER)


def test_text_that_comes_with_the_opening_is_said_as_if_it_had_come_after_it(vd: Checkpoint) -> None:
    worlds = [World(vd) for _ in range(3)]
    request = SpeechRequest(max_frames=30, sampling=Sampling(seed=4))
    whole, begun, apart = worlds
    whole.loop.handle(ME, Open(whole.loop.epoch, 1, request, TEXT, finished=True), 0.0)
    begun.loop.handle(ME, Open(begun.loop.epoch, 1, request, TEXT), 0.0)
    begun.loop.handle(ME, Finish(begun.loop.epoch, 1), 0.0)
    apart.loop.handle(ME, Open(apart.loop.epoch, 1, request), 0.0)
    apart.loop.handle(ME, Append(apart.loop.epoch, 1, TEXT), 0.0)
    apart.loop.handle(ME, Finish(apart.loop.epoch, 1), 0.0)
    for w in worlds:
        w.run()
    assert whole.pcm(1).tobytes() == begun.pcm(1).tobytes() == apart.pcm(1).tobytes() != b""


def test_an_opening_with_too_much_text_or_none_ends_at_once(vd: Checkpoint) -> None:
    world = World(vd)
    long = "a" * (world.loop.config.max_text_chars + 1)
    world.loop.handle(ME, Open(world.loop.epoch, 1, SpeechRequest(), long, finished=True), 0.0)
    failed = world.last(1)
    assert isinstance(failed, Failed)
    assert failed.code == "text_too_long"
    world.loop.handle(ME, Open(world.loop.epoch, 2, SpeechRequest(), finished=True), 0.0)
    assert world.done(2).reason == "empty"
    assert world.loop.idle


class HushStages(LateStages):
    """What the slot `hushed` says cannot be heard."""

    hushed = -1

    def codec(self, rows: list[int], first: list[int], frames: int) -> list[np.ndarray | None]:
        return [pcm if slot != self.hushed or pcm is None else 0 * pcm for slot, pcm in zip(rows, super().codec(rows, first, frames), strict=True)]


def test_who_has_no_text_before_its_first_sound_ends_no_calm(vd: Checkpoint) -> None:
    w = World(vd, HushStages, calm_s=0.05, trim_onset=True)
    w.open(0, "one two three four five six seven eight nine ten eleven twelve.", max_frames=200)
    while w.loop._unheard or not w.loop._active:
        w.run(0.001)
    w.run(0.15)
    w.stages.hushed = 1  # type: ignore[attr-defined]
    w.open(1, "one two ", finish=False, text_rate=100.0)
    while not ((voice := w.loop._active.get((ME, 1))) and voice.utterance.starved and not voice.utterance.in_flight):
        w.run(0.001)
    assert voice.utterance.slot == 1 and not voice.utterance.has_sounded
    depths, launched = [], len(w.loop.trace)
    while len(depths) < 40:
        w.run(0.001)
        depths.append(len(w.loop._flights))
    assert max(depths) == 1 and voice.utterance in w.loop._unheard and len(w.loop.trace) > launched
    # More text: it is somebody new again.
    w.append(1, "three four five six seven ")
    depths.clear()
    while len(depths) < 8:
        w.run(0.001)
        depths.append(len(w.loop._flights))
    assert max(depths) == 2


@pytest.mark.parametrize(("calm_s", "most"), [(0.05, 1), (math.inf, 2)])
def test_in_a_calm_no_launch_waits_behind_another(vd: Checkpoint, calm_s: float, most: int) -> None:
    """Of those who are listened to; somebody new is launched for at once."""
    w = World(vd, LateStages, calm_s=calm_s)
    w.open(0, "one two three four five six seven eight nine ten eleven twelve.", max_frames=200)
    while w.loop._unheard or not w.loop._active:
        w.run(0.001)
    w.run(0.15)
    depths = []
    while len(depths) < 40:
        w.run(0.001)
        depths.append(len(w.loop._flights))
    assert max(depths) == most
    w.open(1, TEXT)
    depths.clear()
    while len(depths) < 8:
        w.run(0.001)
        depths.append(len(w.loop._flights))
    assert max(depths) == 2
