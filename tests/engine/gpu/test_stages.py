"""GpuStages say what Stages say, though they learn late what they have drawn. Where there is no GPU they run eagerly on the kernels' twins."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import DeviceLost
from engine.gpu import conform, graphs, prefixes, state
from engine.gpu import stages as gpu_stages
from engine.gpu.device import captured
from engine.gpu.stages import GpuStages
from engine.loop import EngineLoop
from engine.messages import AudioChunk, Cancel, Finish, Open, Sampling, SpeechRequest
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.model.prompt import AUTO, CloneVoice, Reference, SpeakerVector, build_prefix
from engine.scheduler import Stage
from engine.stages import BaseStages, Stages
from tests.conftest import FIXTURES
from tests.engine.test_loop import CONFIG, ME, Late, World

TEXTS = ["one two three four", "the quick brown fox jumps over the lazy dog", "five", "six seven"]


class LateStages(GpuStages):
    lateness = 0

    def launch(self, stage: Stage, slots: list[int], first: list[int], frames: int) -> Any:
        return Late(super().launch(stage, slots, first, frames), self.lateness)


class GpuWorld(World):
    """`stages` are those of the GPU, or the CPU's."""

    def __init__(self, checkpoint: Checkpoint, kind: type[BaseStages] = GpuStages, *, lateness: int = 0, **changes: object) -> None:
        config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.events = []
        stages = kind(checkpoint, config)
        if isinstance(stages, GpuStages):
            captured(stages)
        if isinstance(stages, LateStages):
            stages.lateness = lateness
        # What a launch takes here has no place in a world whose clock moves when told: it would decide who is launched with whom.
        stages.costs.record = lambda *launch: None  # type: ignore[method-assign]
        self.stages = stages  # type: ignore[assignment]
        self.loop = EngineLoop(stages, config, lambda client, event: self.events.append(event), lambda: self.now_s)
        self.watch()

    def say_all(self, greedy: bool) -> list[tuple[str, np.ndarray]]:
        for number, text in enumerate(TEXTS):
            self.open(number, text, sampling=Sampling(seed=number, greedy=greedy), max_frames=30)
        self.run()
        assert self.stages.free_slots == self.loop.config.slots
        return [(self.done(number).reason, self.pcm(number)) for number in range(len(TEXTS))]


@pytest.fixture(scope="module", params=["cv17", "cv06"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return load_checkpoint(FIXTURES / "checkpoints" / request.param)


def assert_alike(wanted: list[tuple[str, np.ndarray]], found: list[tuple[str, np.ndarray]]) -> None:
    for (why, samples), (why_too, samples_too) in zip(wanted, found, strict=True):
        assert why == why_too and len(samples) == len(samples_too) > 0
        # Two ways of computing the same in float32, rounded to 16 bits.
        assert np.abs(samples.astype(int) - samples_too).max() <= 4


@pytest.mark.parametrize("greedy", [True, False])
def test_says_what_the_cpu_says(checkpoint: Checkpoint, greedy: bool) -> None:
    assert_alike(GpuWorld(checkpoint, Stages).say_all(greedy), GpuWorld(checkpoint).say_all(greedy))


@pytest.mark.parametrize("lateness", [1, 2, 5])
def test_what_is_learnt_late_changes_nothing_that_is_heard(checkpoint: Checkpoint, lateness: int) -> None:
    ends = set()
    for greedy in (True, False):
        wanted = GpuWorld(checkpoint, Stages).say_all(greedy)
        assert_alike(wanted, GpuWorld(checkpoint, LateStages, lateness=lateness).say_all(greedy))
        ends |= {why for why, _ in wanted}
    assert "end" in ends, "no text ended by itself: nothing was made beyond an end"


def test_at_most_two_launches_are_under_way(checkpoint: Checkpoint) -> None:
    world = GpuWorld(checkpoint, LateStages, lateness=3)
    most = 0
    for number, text in enumerate(TEXTS):
        world.open(number, text, max_frames=10)
    while not world.loop.idle:
        world.loop.turn(world.now_s)
        most = max(most, len(world.loop._flights))
        world.now_s += 0.001
    assert most == 2


def test_a_slot_given_back_in_mid_flight_serves_the_next_one_whole(checkpoint: Checkpoint) -> None:
    wanted = GpuWorld(checkpoint, Stages)
    wanted.open(9, TEXTS[1], sampling=Sampling(seed=9), max_frames=20)
    wanted.run()
    for turns in range(1, 14, 3):
        world = GpuWorld(checkpoint, LateStages, lateness=2, slots=1)
        world.open(1, TEXTS[0], sampling=Sampling(seed=1), max_frames=20)
        for _ in range(turns):
            world.loop.turn(world.now_s)
            world.now_s += 0.001
        world.loop.handle(ME, Cancel(world.loop.epoch, 1), world.now_s)
        heard = len([event for event in world.events if isinstance(event, AudioChunk) and event.utterance == 1])
        world.open(9, TEXTS[1], sampling=Sampling(seed=9), max_frames=20)
        world.run()
        assert_alike([("", wanted.pcm(9))], [("", world.pcm(9))])
        assert len([event for event in world.events if isinstance(event, AudioChunk) and event.utterance == 1]) == heard


def test_a_slot_taken_again_before_any_launch_says_nothing_of_the_text_before(checkpoint: Checkpoint) -> None:
    worlds = [GpuWorld(checkpoint, kind, slots=1) for kind in (Stages, GpuStages)]
    for world in worlds:
        world.open(1, TEXTS[1], max_frames=30)
        world.loop._admit(world.now_s)
        assert world.stages.free_slots == 0
        world.loop.handle(ME, Cancel(world.loop.epoch, 1), world.now_s)
        world.open(9, TEXTS[2], sampling=Sampling(seed=1), max_frames=30)
        world.run()
    assert_alike([("", worlds[0].pcm(9))], [("", worlds[1].pcm(9))])


def test_a_device_that_fails_as_a_prompt_is_computed_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for the fault of the utterance: the next one would fare no better."""
    world = GpuWorld(load_checkpoint(FIXTURES / "checkpoints" / "vd17"))

    def embed(*arguments: object) -> torch.Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu_stages, "embed", embed)
    world.open(0, TEXTS[0], instructions="calm")
    with pytest.raises(DeviceLost, match="illegal memory"):
        world.run()


def test_a_text_of_more_words_than_one_delivery_holds(checkpoint: Checkpoint) -> None:
    text = "one two three four five six seven eight nine ten. " * 60
    worlds = [GpuWorld(checkpoint, kind, positions=2048) for kind in (Stages, GpuStages)]
    for world in worlds:
        world.open(0, text, sampling=Sampling(seed=3), max_frames=20)
        world.open(1, text, sampling=Sampling(seed=4), max_frames=20)
        world.run()
    for number in (0, 1):
        assert_alike([("", worlds[0].pcm(number))], [("", worlds[1].pcm(number))])


def test_conforms_by_sound(capsys: pytest.CaptureFixture[str]) -> None:
    """All variants, layouts, clone voices: what is heard is the official code's, sample by sample."""
    assert conform.run(FIXTURES, [], torch.device("cpu")) == 0
    assert "26 passed, 0 failed" in capsys.readouterr().out


def test_a_clip_dropped_meanwhile_is_kept_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment a voice takes its slot and the end of its prompt, others may push its clip's state out of those that are kept."""
    stages = GpuWorld(load_checkpoint(FIXTURES / "checkpoints" / "base17")).stages
    assert isinstance(stages, GpuStages)
    monkeypatch.setattr(gpu_stages, "MOST_PRIMED", 1)
    clips = [Reference((1, 2), ((number,) * stages.checkpoint.config.talker.groups,) * 3) for number in (3, 4)]
    for clip in clips:
        steps, last = stages._prime(0, clip)
        for step in (*steps, last):
            step()
    _, last = stages._prime(0, clips[1])
    steps, other = stages._prime(1, clips[0])
    for step in (*steps, other, last):
        step()
    assert list(stages._primed) == [clips[1]]


@pytest.mark.parametrize(("words", "fresh"), [(1024, 16), (30, 16), (1024, 1), (30, 1)])
def test_beginnings_that_a_letter_does_not_hold(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, words: int, fresh: int) -> None:
    """The rest is told, and done, before the launch: a slot is never cleared after it has been told something."""
    monkeypatch.setattr(graphs, "MOST_MAIL", words)
    monkeypatch.setattr(graphs, "MOST_FRESH", fresh)
    world = GpuWorld(checkpoint)
    world.say_all(greedy=False)
    # Again, with the prefix known to all of them.
    for number, text in enumerate(TEXTS, start=10):
        world.open(number, text, sampling=Sampling(seed=number - 10), max_frames=30)
    world.run()
    wanted = GpuWorld(checkpoint, Stages).say_all(False)
    assert_alike(wanted, [(world.done(number).reason, world.pcm(number)) for number in range(10, 10 + len(TEXTS))])


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_beside_it_an_utterance_says_what_it_says_alone(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Slots given back and taken again at any moment, few prefixes kept, letters that hold little, text that comes bit by bit."""
    chance = random.Random(seed)
    monkeypatch.setattr(graphs, "MOST_FRESH", chance.choice([1, 2, 16]))
    monkeypatch.setattr(graphs, "MOST_MAIL", chance.choice([40, 1024]))
    most = chance.choice([1, 2, 64]), chance.choice([4, 32])
    for module in (prefixes, state):
        monkeypatch.setattr(module, "PREFIXES", most[0])
        monkeypatch.setattr(module, "MOST_PREFIX", most[1])
    checkpoint = load_checkpoint(FIXTURES / "checkpoints" / "vd17")
    # One shape for all launches: now and then a draw hangs on the last bit.
    shape = {"buckets": (4,), "chunk_frames": (1,), "prefill_rows": chance.choice([4, 16])}
    world = GpuWorld(checkpoint, slots=3, longest_wait_s=1e9, calm_s=chance.choice([0.05, math.inf]), **shape)
    asked: list[tuple[SpeechRequest, str]] = []
    unwritten: dict[int, str] = {}

    def write(number: int, count: int) -> None:
        text, unwritten[number] = unwritten[number][:count], unwritten[number][count:]
        if text:
            world.append(number, text)
        if not unwritten[number]:
            del unwritten[number]
            world.loop.handle(ME, Finish(world.loop.epoch, number), world.now_s)

    for _ in range(90):
        what = chance.choices(["open", "write", "cancel", "turns"], [2, 2, 1, 6])[0]
        number = len(asked)
        if what == "open" and number < 8:
            own = {"pace": chance.choice(["live", "file"]), "instructions": chance.choice(["", "calm", "a low voice " * 4])}
            request = SpeechRequest(max_frames=20, whole_text=chance.random() < 0.3, sampling=Sampling(seed=number % 3), **own)
            text = chance.choice([*TEXTS, TEXTS[1] + ". " + TEXTS[0]])
            asked.append((request, text))
            begun = chance.choice([0, 5, len(text)])
            whole = begun == len(text)
            if not whole:
                unwritten[number] = text[begun:]
            world.loop.handle(ME, Open(world.loop.epoch, number, request, text[:begun], whole), world.now_s)
        elif what == "write" and unwritten:
            write(chance.choice(list(unwritten)), chance.randrange(1, 20))
        elif what == "cancel" and asked:
            world.loop.handle(ME, Cancel(world.loop.epoch, chance.randrange(number)), world.now_s)
        else:
            for _ in range(chance.randrange(1, 9)):
                world.loop.turn(world.now_s)
                world.now_s += 0.001
    for number in list(unwritten):
        write(number, 100)
    world.run(300.0)
    assert world.loop.idle and world.stages.free_slots == 3
    said = 0
    for number, (request, text) in enumerate(asked):
        if world.done(number).reason != "cancelled":
            alone = GpuWorld(checkpoint, **shape)
            alone.loop.handle(ME, Open(alone.loop.epoch, 0, request, text, finished=True), 0.0)
            alone.run()
            assert_alike([(alone.done(0).reason, alone.pcm(0))], [(world.done(number).reason, world.pcm(number))])
            said += 1
    assert said > 2


def test_a_known_clip_is_spoken_on_from_like_a_new_one() -> None:
    stages = GpuWorld(load_checkpoint(FIXTURES / "checkpoints" / "base17")).stages
    assert isinstance(stages, GpuStages)
    clip = Reference((1, 2), ((3,) * stages.checkpoint.config.talker.groups,) * 3)
    config = stages.checkpoint.config
    voice = CloneVoice(SpeakerVector("nobody", torch.zeros(config.talker.body.hidden)), clip)
    prefix = build_prefix(config, stages.checkpoint.tokenizer, voice=voice, language=AUTO, instructions="")
    found = []
    for _ in range(2):
        slot, pieces = stages.begin(prefix, Sampling(greedy=True), 0, may_end=False, reference=clip)
        for _ in range(pieces):
            stages.prefill(slot)
        tokens = stages.launch(Stage.TALKER, [slot], [0], 1).result()
        found.append((pieces, tokens, stages.slots.hidden[slot].clone()))
        stages.close(slot)
    assert found[0][0] > found[1][0] == 0
    assert found[0][1] == found[1][1]
    assert torch.equal(found[0][2], found[1][2])
