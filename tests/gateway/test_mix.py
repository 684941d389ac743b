"""Texts of one session that sound at once, and those that take each other's place. Real sockets, aiortc."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.media.mixer import Mixer, mixed
from gateway.media.opus import PACKET_SAMPLES
from gateway.media.playhead import Packet, Share
from tests.gateway.clients import until
from tests.gateway.matching import align
from tests.gateway.stand_in import RATE, StandInEngine

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards argue."
LONG = f"{TEXT} {TEXT}"
"""So much that the engine is not through with it when it is cancelled: it is three seconds ahead."""
SHORT = "Just a few words, and then some."


async def mixing(connect):
    speaker = await connect("webrtc")
    await speaker.send("session.update", policy="mix")
    assert (await speaker.event("session.updated"))["policy"] == "mix"
    return speaker


async def write(speaker, text: str) -> None:
    await speaker.send("text.append", text=text)
    await speaker.send("text.end")


def summed(pcm: bytes, *others: tuple[float, bytes]) -> bytes:
    """One utterance's samples with others from so many seconds on."""
    total: NDArray[np.int64] = np.frombuffer(pcm, "<i2").astype(np.int64)
    for at_s, other in others:
        added = np.frombuffer(other, "<i2").astype(np.int64)
        start = round(at_s * RATE)
        total[start : start + len(added)] += added[: len(total) - start]
    return np.clip(total, -32768, 32767).astype("<i2").tobytes()


@pytest.mark.real_time
async def test_two_texts_sound_at_once(connect, listen, engine: StandInEngine) -> None:
    speaker = await mixing(connect)
    listener = await listen(speaker)
    await write(speaker, TEXT)
    first = await speaker.event("utterance.started")
    await until(lambda: len(listener.arrivals) >= 50)
    await write(speaker, SHORT)
    second = await speaker.event("utterance.started")
    assert (first["utterance"], second["utterance"]) == (1, 2)
    dones = [await speaker.event("utterance.done") for _ in range(2)]
    assert [(done["utterance"], done["text"]) for done in dones] == [(2, SHORT), (1, TEXT)]
    # Where the second joined is told by the packets' times.
    at_s = ((second["rtp_time"] - first["rtp_time"]) % 2**32) / 48000
    assert 0.95 < at_s < 1.4
    made = [bytes(utterance.pcm) for utterance in engine.utterances]
    await speaker.say(SHORT)
    _, scores = align(listener.samples, summed(made[0], (at_s, made[1])))
    assert min(scores) >= 0.9
    _, alone = align(listener.samples, made[0])
    assert min(alone) < 0.9, "one alone is not what was heard"
    progress = {
        number: [event["spoken_ms"] for event in speaker.events if event["type"] == "utterance.progress" and event["utterance"] == number]
        for number in (1, 2)
    }
    assert all(spoken == sorted(set(spoken)) and len(spoken) > 4 for spoken in progress.values())


@pytest.mark.real_time
async def test_one_cancelled_leaves_the_other_sounding(connect, listen, engine: StandInEngine) -> None:
    speaker = await mixing(connect)
    listener = await listen(speaker)
    await write(speaker, LONG)
    first = await speaker.event("utterance.started")
    await until(lambda: len(listener.arrivals) >= 20)
    await write(speaker, TEXT)
    second = await speaker.event("utterance.started")
    await until(lambda: len(listener.arrivals) >= 65)
    await speaker.send("cancel", utterance=1)
    cancelled = await speaker.event("utterance.cancelled")
    assert cancelled["utterance"] == 1 and 1000 < cancelled["heard_ms"] < 1600
    assert LONG.startswith(cancelled["heard_text"]) and 10 < len(cancelled["heard_text"]) < 40
    sent = len(listener.arrivals)
    done = await speaker.event("utterance.done")
    assert (done["utterance"], done["text"]) == (2, TEXT)
    await until(lambda: engine.utterances[0].cancelled)
    assert not engine.utterances[1].cancelled
    at_s = ((second["rtp_time"] - first["rtp_time"]) % 2**32) / 48000
    await speaker.say(SHORT)
    # Behind the cancel the second is heard alone, and all of it. (From there on no window lies in a pause, of which Opus keeps less.)
    rest = bytes(engine.utterances[1].pcm)[2 * round((cancelled["heard_ms"] / 1000 - at_s + 0.45) * RATE) :]
    heard = listener.samples[960 * (sent - 10) :]
    _, scores = align(heard, rest)
    assert min(scores) >= 0.9
    steps = np.diff([rtp for _, rtp in sorted([*listener.silences, *listener.arrivals])])
    assert np.count_nonzero(steps != 960) <= 2


async def test_a_new_listener_hears_nothing_of_what_was_cancelled(connect, listen, engine: StandInEngine) -> None:
    speaker = await mixing(connect)
    await listen(speaker)
    await write(speaker, TEXT)
    await speaker.event("utterance.started")
    await asyncio.sleep(0.4)
    await write(speaker, TEXT)
    await speaker.event("utterance.started")
    await asyncio.sleep(0.6)
    await speaker.send("cancel", utterance=1)
    await speaker.event("utterance.cancelled")
    second = await listen(speaker)
    assert (await speaker.event("utterance.done"))["utterance"] == 2
    await speaker.say(SHORT)
    _, scores = align(second.samples, bytes(engine.utterances[1].pcm)[2 * RATE :])
    assert min(scores) >= 0.9


async def test_cancel_without_a_number_ends_all(connect, listen, engine: StandInEngine) -> None:
    speaker = await mixing(connect)
    listener = await listen(speaker)
    for _ in range(3):
        await write(speaker, LONG)
    for _ in range(3):
        await speaker.event("utterance.started")
    await asyncio.sleep(0.3)
    await speaker.send("cancel")
    assert {(await speaker.event("utterance.cancelled"))["utterance"] for _ in range(3)} == {1, 2, 3}
    count = len(listener.arrivals)
    await asyncio.sleep(0.3)
    assert len(listener.arrivals) <= count + 1
    await until(lambda: all(utterance.cancelled for utterance in engine.utterances))


async def test_a_text_in_pieces_is_said_piece_after_piece(connect, listen, engine: StandInEngine) -> None:
    """What goes on after a flush, or after the engine has run out of text, does not sound at once with its own beginning."""
    speaker = await mixing(connect)
    await listen(speaker)
    await speaker.send("text.append", text="Hold on ")
    await speaker.send("text.flush")
    await speaker.send("text.append", text="to this.")
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    assert (await speaker.event("utterance.done"))["utterance"] == 1
    assert (await speaker.event("utterance.started"))["utterance"] == 2
    assert (await speaker.event("utterance.done"))["text"] == "to this."


async def test_more_at_once_than_may_be_is_refused(connect, listen, gateway) -> None:
    speaker = await mixing(connect)
    await listen(speaker)
    for _ in range(8):
        await write(speaker, SHORT)
    await write(speaker, SHORT)
    error = await speaker.event("error")
    assert error["code"] == "too_many_utterances" and "max_mixed_texts" in error["message"] and error["retryable"]


async def test_replace_takes_the_place_of_what_is_spoken(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    await speaker.send("session.update", policy="replace")
    assert (await speaker.event("session.updated"))["policy"] == "replace"
    await write(speaker, TEXT)
    await speaker.event("utterance.started")
    await asyncio.sleep(0.5)
    await speaker.send("text.append", text="Instead ")
    await speaker.send("text.append", text="this.")
    await speaker.send("text.end")
    assert (await speaker.event("utterance.cancelled"))["utterance"] == 1
    done = await speaker.event("utterance.done")
    assert (done["utterance"], done["text"]) == (2, "Instead this.")


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"policy": "blend"}, "queue, replace, mix"),
        ({"policy": "mix"}, "audio.format to webrtc"),
        ({"policy": 3}, "policy"),
    ],
)
async def test_a_policy_that_cannot_be(connect, fields: dict[str, object], about: str) -> None:
    speaker = await connect()
    await speaker.send("session.update", **fields)
    error = await speaker.event("error")
    assert error["code"] == "invalid_event" and "policy" in error["message"] and about in error["message"]
    await speaker.say(SHORT)


async def test_mixing_begins_only_in_silence(connect, listen) -> None:
    speaker = await connect("webrtc")
    await listen(speaker)
    await write(speaker, SHORT)
    await speaker.send("session.update", policy="mix")
    assert (await speaker.event("error"))["code"] == "session_busy"
    await speaker.event("utterance.done")
    await speaker.send("session.update", policy="mix")
    assert (await speaker.event("session.updated"))["policy"] == "mix"


def test_a_sum_stays_in_range() -> None:
    shares = tuple(
        Share(number, PACKET_SAMPLES, True, np.full(PACKET_SAMPLES, value, "<i2").tobytes()) for number, value in enumerate((30000, 20000))
    )
    assert set(np.frombuffer(mixed(shares), "<i2")) == {32767}


async def test_what_is_put_back_is_mixed_again_without_what_was_dropped() -> None:
    with ThreadPoolExecutor(1) as encoders:
        mixer = Mixer(encoders, lambda: None)
        pcm = {number: np.random.default_rng(number).integers(-9000, 9000, 3000, np.int16).tobytes() for number in (1, 2)}
        for number, samples in pcm.items():
            mixer.begin(number, None)
            await mixer.write(number, samples)
            await mixer.end(number)
        taken: list[Packet] = []
        while mixer.ready:
            await mixer.prepare()
            packet = mixer.take()
            assert packet is not None
            taken.append(packet)
        assert sorted(mixer.over()) == [1, 2] and mixer.over() == []
        assert [sum(share.samples for packet in taken for share in packet.shares if share.utterance == number) for number in (1, 2)] == [3000, 3000]
        again = [kept for packet in taken[3:] if (kept := packet.without({1})) is not None]
        mixer.put_back(again)
        mixer.drop({1})
        rest = []
        while mixer.ready:
            await mixer.prepare()
            packet = mixer.take()
            assert packet is not None
            rest.append(packet)
        assert b"".join(share.pcm for packet in rest for share in packet.shares)[: 2 * (3000 - 3 * PACKET_SAMPLES)] == pcm[2][6 * PACKET_SAMPLES :]
        assert mixer.over() == [], "its end has been told"
