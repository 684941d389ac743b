"""What cannot be spoken, through the engine protocol: a typed error that names field and remedy, or a clean end without sound."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio

from engine import Done, EngineClient, EngineUnavailable, RequestRefused, Sampling, SpeechRequest
from engine.messages import (
    PROTOCOL_VERSION,
    Append,
    Failed,
    Finish,
    Hello,
    Open,
    Started,
    Unwelcome,
    decode_command,
    decode_event,
    encode,
)
from engine.model.checkpoint import Checkpoint
from tests.engine.test_live_text import Sender
from tests.engine.test_loop import CONFIG, ME, World
from tests.engine.test_service import listen, say, start_engine

NOTHING = ["", " \n\t", "👍", "👨‍👩‍👧 🇫🇷", "...", "—!?", "***", "\x00\x07\u200b\ufeff"]


# Nothing to say


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("text", NOTHING)
def test_nothing_to_say_is_done_at_once_without_sound(tiny: Checkpoint, text: str, live: bool) -> None:
    world = World(tiny)
    world.open(1, text, live=live)
    assert world.events == [Done(world.loop.epoch, 1, "empty", 0, len(text))]
    assert world.loop.idle and world.stages.free_slots == CONFIG.slots


@pytest.mark.parametrize("text", NOTHING)
def test_nothing_to_say_yet_takes_no_slot_until_words_come(tiny: Checkpoint, text: str) -> None:
    world = World(tiny)
    world.open(1, text, finish=False, max_frames=100)
    world.run(5.0)
    assert world.events == [] and world.stages.free_slots == CONFIG.slots
    world.append(1, " Great")
    world.loop.handle(ME, Finish(world.loop.epoch, 1), world.now_s)
    world.run()
    assert world.done(1).samples > 0 and world.done(1).text_until == len(text) + len(" Great")


def test_a_pause_after_an_emoji_and_half_a_word_does_not_speak_the_emoji_alone(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.open(1, "👍 Gre", finish=False, max_frames=100, sampling=Sampling(seed=1))
    world.run(1.0)
    assert world.events == []
    world.run()
    assert isinstance(world.events[0], Started)
    assert (world.done(1).reason, world.done(1).text_until) == ("idle", len("👍 Gre"))


def test_what_is_never_said_does_not_change_the_sound(tiny: Checkpoint) -> None:
    world = World(tiny)
    for number, text in enumerate(("one wonderful day", "one\x07 won\u200bder\u00adful day\ufeff"), 1):
        world.open(number, text, sampling=Sampling(greedy=True))
        world.run()
    assert world.pcm(1).tobytes() == world.pcm(2).tobytes()
    assert world.done(2).text_until == len("one wonderful day") + 4


# Text longer than a slot

SENTENCES = "the quick brown fox. it jumps and stops, one two three. four five six, seven eight. the old bridge, the bells. "


class SlowReader(Sender):
    """Its voice takes 120 ms a character, almost twice as long as usual."""

    def open(self) -> None:
        self.world.stages.talker_stage.force = self.at_its_pace
        super().open()

    def at_its_pace(self, group: int, rows: list[int], tokens: torch.Tensor) -> torch.Tensor:
        slots, end = self.world.stages.slots, self.world.stages.talker_stage.codebook
        for row, slot in enumerate(rows):
            text = next((voice.text for voice in self.world.loop._active.values() if voice.utterance.slot == slot), None)
            said = text is not None and bool(slots.may_end[slot]) and slots.steps[slot] * 0.08 >= text.received * 0.12
            tokens[row] = end if said else (7 * slots.steps[slot]) % 61
        return tokens


def dones(world: World) -> list[Done]:
    return [event for event in world.events if isinstance(event, Done)]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize("text", [SENTENCES * 5, SENTENCES.replace(".", "").replace(",", "") * 5, "今天很好，我们去公园。你好！再见了，" * 8])
def test_a_text_longer_than_a_slot_goes_on_in_the_next_utterance_and_no_word_is_lost(tiny: Checkpoint, text: str, piece: int) -> None:
    pieces = [(0.01 * number, text[at : at + piece]) for number, at in enumerate(range(0, len(text), piece))]
    reader = SlowReader(World(tiny, slots=2), pieces, None)
    reader.run()
    assert "".join(reader.spoken) == text and len(reader.spoken) > 2
    for part in reader.spoken[:-1]:
        if "." in text or "。" in text:
            assert re.search(r"[.。！，,]\s*$", part), part
        else:
            assert part.endswith(" "), part
    ends = dones(reader.world)
    assert [done.reason for done in ends] == ["length"] * (len(ends) - 1) + ["end"]
    for done in ends:
        # It ended by itself: the slot was not full, and the guard did not have to.
        assert done.samples / 1920 < CONFIG.positions - 30
        assert done.samples / 24_000 > done.text_until * 0.12 - 0.08
    assert reader.gaps == []


def test_whole_text_longer_than_a_slot_ends_at_a_sentence(tiny: Checkpoint) -> None:
    world = World(tiny)
    text = "one two three. " * 20
    world.open(1, text, live=False, max_frames=None)
    world.run()
    assert world.done(1).reason == "length" and text[: world.done(1).text_until] == "one two three. " * 5


# Requests


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300])
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("temperature", "expected 0.01 to 2.0"),
        ("predictor_temperature", "expected 0.01 to 2.0"),
        ("top_p", "expected 1e-06 to 1.0"),
        ("predictor_top_p", "expected 1e-06 to 1.0"),
        ("repetition_penalty", "expected 1.0 to 2.0"),
        ("text_rate", "expected 0.01 to 1000000000.0"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_range(tiny: Checkpoint, field: str, expected: str, value: float) -> None:
    world = World(tiny)
    fields = {field: value} if field == "text_rate" else {"sampling": Sampling(**{field: value})}
    world.open(1, "hello", **fields)
    failed = world.last(1)
    assert isinstance(failed, Failed) and failed.code == "invalid_request" and not failed.retryable
    assert failed.message == f"{field}: {value} is out of range, {expected}; leave it out for the usual value"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("top_k", 0, "1 to 1000000"),
        ("top_k", 2**40, "1 to 1000000"),
        ("predictor_top_k", -5, "1 to 1000000"),
        ("seed", -1, "0 to 9223372036854775807"),
        ("seed", 2**63, "0 to 9223372036854775807"),
    ],
)
def test_a_whole_number_out_of_range_is_refused_with_its_range(tiny: Checkpoint, field: str, value: int, expected: str) -> None:
    world = World(tiny)
    world.open(1, "hello", sampling=Sampling(**{field: value}))
    failed = world.last(1)
    assert isinstance(failed, Failed)
    assert failed.message == f"{field}: {value} is out of range, expected {expected}; leave it out for the usual value"


def test_an_instruction_longer_than_the_context_is_refused_with_the_limit(tiny: Checkpoint) -> None:
    world = World(tiny)
    for number, text in enumerate(("speak slowly " * 100, "x" * 100_000), 1):
        world.open(number, "hello", instructions=text)
    first, second = world.last(1), world.last(2)
    assert isinstance(first, Failed) and isinstance(second, Failed)
    assert re.fullmatch(r"instructions: \d+ prompt positions leave no room for speech, at most 156 may be taken; shorten them", first.message)
    assert second.message == "instructions: 100000 characters, at most 20000 can be taken; shorten them"


def test_a_hundred_thousand_characters_at_once_are_refused_with_the_limit(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.open(1, "one two. " * 11_112)
    failed = world.last(1)
    assert isinstance(failed, Failed) and failed.code == "text_too_long"
    assert failed.message == "text: 100008 characters, an utterance may have 20000; send it as several utterances"


def test_a_client_of_another_version_is_told(tiny: Checkpoint) -> None:
    world = World(tiny)
    world.loop.handle(ME, Hello(PROTOCOL_VERSION + 1), 0.0)
    assert world.events == [Unwelcome(PROTOCOL_VERSION)]


# Over the socket


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[EngineClient]:
    endpoint = f"ipc://{tmp_path}/engine.sock"
    process = start_engine(endpoint)
    try:
        async with EngineClient(endpoint, hello_every_s=0.2) as client:
            yield client
    finally:
        process.kill()
        process.wait()


async def test_what_is_wrong_with_a_message_is_answered_or_logged_and_hurts_nobody(client: EngineClient) -> None:
    for sampling, message in (
        (Sampling(temperature="hot"), "temperature: expected `float | null`, got `str`"),  # type: ignore[arg-type]
        (Sampling(top_k=1.5), "top_k: expected `int | null`, got `float`"),  # type: ignore[arg-type]
        (Sampling(greedy="yes"), "greedy: expected `bool`, got `str`"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RequestRefused) as caught:
            await listen(client.open(SpeechRequest(sampling=sampling)))
        assert str(caught.value) == message
    with pytest.raises(RequestRefused, match=r"voice: expected `str \| null`, got `array`"):
        await listen(client.open(SpeechRequest(voice=["vivian"])))  # type: ignore[arg-type]
    for text in ("half \ud83d", "\ude00"):
        utterance = client.open(SpeechRequest())
        with pytest.raises(RequestRefused, match=r"text: '\\ud[0-9a-f]{3}' is half of a surrogate pair and no character; send both"):
            utterance.append(text)
        utterance.append("one")
        utterance.finish()
        await listen(utterance)
    with pytest.raises(RequestRefused, match="request: can't serialize ints"):
        client.open(SpeechRequest(sampling=Sampling(seed=2**70)))
    for text in NOTHING:
        assert (await listen(say(client, text)))[1].reason == "empty"
    assert (await listen(say(client, "one")))[1].samples > 0


async def test_bytes_that_are_no_text_fail_the_utterance_they_name(client: EngineClient) -> None:
    context = zmq.asyncio.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(client.endpoint)

        async def answer() -> object:
            async with asyncio.timeout(60):
                return decode_event.decode(await socket.recv())

        await socket.send(encode(Open(client.epoch, 1, SpeechRequest())))
        await socket.send(encode(Append(client.epoch, 1, "abcd")).replace(b"abcd", b"a\xff\xfeb"))
        assert await answer() == Failed(client.epoch, 1, "invalid_request", "append: invalid UTF-8 encoded string", False)
        await socket.send(encode(Append(client.epoch, 1, "more")))
        await socket.send(msgspec.msgpack.encode({"type": "shout", "epoch": client.epoch, "utterance": 2}))
        failed = await answer()
        assert isinstance(failed, Failed) and failed.utterance == 2 and "shout" in failed.message
        for body in (encode(Open(1, 2, SpeechRequest()))[:-3], b"\x81\xa4type\xa4open", msgspec.msgpack.encode({"type": "open", "utterance": "x"})):
            await socket.send(body)
        await socket.send(encode(Hello(PROTOCOL_VERSION + 1)))
        assert await answer() == Unwelcome(PROTOCOL_VERSION), "what names no utterance is not answered"
    context.term()
    await listen(say(client, "one"))


async def test_a_client_of_another_version_says_so_at_once(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/engine.sock"
    context = zmq.asyncio.Context()
    with context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)

        async def newer_engine() -> None:
            peer, body = await socket.recv_multipart()
            assert decode_command.decode(body) == Hello(PROTOCOL_VERSION)
            await socket.send_multipart((peer, encode(Unwelcome(7))))

        task = asyncio.create_task(newer_engine())
        with pytest.raises(EngineUnavailable, match="speaks protocol version 7, this client 2; install the same release for both") as caught:
            await EngineClient(endpoint, timeout_s=60).start()
        assert caught.value.code == "version_mismatch" and not caught.value.retryable
        await task
    context.term()
