"""The WebRTC listener, with a real aiortc client on the other side."""

from __future__ import annotations

import asyncio
import itertools
import time
import wave
from pathlib import Path

import aioice.ice
import msgspec
import numpy as np
import pytest

from gateway.keys import PEERS, SESSIONS
from gateway.media.line import OpusLine
from gateway.media.pacer import BURST_PACKETS
from gateway.rtc import ice
from tests.gateway.clients import PATIENCE_S, until
from tests.gateway.matching import align
from tests.gateway.stand_in import StandInEngine

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards argue."
LONG = f"{TEXT} {TEXT}"
SHORT = "Just a few words."


def gaps(arrivals: list[tuple[float, int]]) -> list[int]:
    """Differences of RTP time between packets, in packets."""
    return [(after[1] - before[1]) % 2**32 // 960 for before, after in itertools.pairwise(arrivals)]


def gapless(arrivals: list[tuple[float, int]], line: OpusLine) -> bool:
    """Whether RTP time ran on without a step, but for stalls of this busy machine, which the line has counted. One between two
    utterances is never counted."""
    return sum(step != 1 for step in gaps(arrivals)) <= line.underruns + line.stalls <= 3


def line(gateway, speaker) -> OpusLine:
    return gateway.app[SESSIONS].by_token(speaker.created["token"]).media


@pytest.mark.real_time
async def test_listener_hears_what_the_engine_made(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    assert (await speaker.say(TEXT))["reason"] == "end"
    assert (await speaker.say(SHORT))["reason"] == "end"
    assert speaker.pcm == b""
    made = bytes(engine.utterances[0].pcm)
    packets = -(-(len(made) // 2 + 156) // 480)
    _, scores = align(listener.samples, made)
    assert min(scores) >= 0.9
    assert gapless(listener.arrivals[:packets], line(gateway, speaker))


@pytest.mark.real_time
async def test_the_stream_starts_with_a_burst_and_goes_on_in_real_time(connect, listen) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    await speaker.say(TEXT)
    times = np.array(sorted(at for at, _ in [*listener.silences, *listener.arrivals]))
    assert times[BURST_PACKETS - 1] - times[0] < 0.015
    assert abs(np.median(np.diff(times[BURST_PACKETS:])) - 0.02) < 0.002
    assert -0.01 < (times[-1] - times[0]) - 0.02 * (len(times) - BURST_PACKETS) < 0.5


@pytest.mark.real_time
async def test_silence_fills_the_time_between_utterances(connect, listen, gateway) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    await speaker.say(SHORT)
    await asyncio.sleep(0.5)
    await speaker.say(SHORT)
    everything = sorted([*listener.silences, *listener.arrivals])
    assert len(listener.silences) > 20
    assert gapless(everything, line(gateway, speaker))


@pytest.mark.real_time
async def test_a_stream_nobody_speaks_to_stops_and_its_rtp_time_goes_on(connect, listen, gateway) -> None:
    sessions = gateway.app[SESSIONS]
    sessions._config = msgspec.structs.replace(sessions._config, awake_s=0.3)
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    await speaker.say(SHORT)
    await until(lambda: not line(gateway, speaker).awake(time.monotonic()))
    await asyncio.sleep(0.3)
    silences, ended_s = len(listener.silences), time.monotonic()
    count = len(listener.arrivals)
    await asyncio.sleep(1.0)
    assert (len(listener.silences), len(listener.arrivals)) == (silences, count)
    await speaker.say(SHORT)
    first, second = listener.arrivals[0], listener.silences[silences]
    assert second[0] > ended_s + 1.0
    ticks = (second[1] - first[1]) % 2**32
    assert ticks % 960 == 0
    assert abs(ticks / 48000 - (second[0] - first[0])) < 0.08


@pytest.mark.real_time
async def test_utterances_that_wait_follow_without_a_gap(connect, listen, gateway) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    for _ in range(3):
        await speaker.send("text.append", text=SHORT)
        await speaker.send("text.end")
    for _ in range(3):
        await speaker.event("utterance.done")
    assert gapless(listener.arrivals, line(gateway, speaker))


@pytest.mark.real_time
async def test_done_comes_when_all_has_been_paced_out(connect, listen) -> None:
    speaker = await connect("webrtc")
    await listen(speaker)
    begun_s = time.monotonic()
    done = await speaker.say(TEXT)
    assert 0 < done["duration_ms"] / 1000 - 0.04 < time.monotonic() - begun_s < done["duration_ms"] / 1000 + 0.3
    spoken = [event["spoken_ms"] for event in speaker.events if event["type"] == "utterance.progress"]
    assert len(spoken) >= 15 and spoken == sorted(set(spoken))


@pytest.mark.real_time
async def test_cancel_stops_within_a_packet(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    # The engine is three seconds ahead, and not to be through with it.
    await speaker.send("text.append", text=LONG)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    await until(lambda: len(listener.arrivals) >= 45)
    await speaker.send("cancel")
    cancelled = await speaker.event("utterance.cancelled")
    count = len(listener.arrivals)
    await asyncio.sleep(0.2)
    assert len(listener.arrivals) <= count + 1
    assert cancelled["rtp_until"] == (listener.arrivals[-1][1] + 960) % 2**32
    assert 550 < cancelled["heard_ms"] < 1000
    assert LONG.startswith(cancelled["heard_text"]) and cancelled["heard_text"]
    await until(lambda: engine.utterances[0].cancelled)
    listened = len(listener.samples)
    await speaker.say(SHORT)
    await speaker.say(SHORT)
    _, scores = align(listener.samples[listened:], bytes(engine.utterances[1].pcm))
    assert min(scores) >= 0.9


async def test_text_waits_for_a_listener(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await asyncio.sleep(0.5)
    assert not engine.utterances, "an utterance nobody hears holds a place in the engine"
    listener = await listen(speaker)
    await speaker.event("utterance.done")
    await speaker.say(SHORT)
    _, scores = align(listener.samples, bytes(engine.utterances[0].pcm))
    assert min(scores) >= 0.9


async def test_a_second_listener_replaces_the_first(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    first = await listen(speaker)
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    await until(lambda: len(first.arrivals) >= 25)
    second = await listen(speaker)
    await speaker.event("utterance.done")
    whole = -(-(len(engine.utterances[0].pcm) // 2 + 156) // 480)
    # A little is said to both.
    await until(lambda: len(first.arrivals) + len(second.arrivals) >= whole)
    assert second.arrivals[0][0] > first.arrivals[-1][0] and len(second.arrivals) < whole
    await asyncio.wait_for(first.closed.wait(), PATIENCE_S)
    await until(lambda: set(gateway.app[PEERS]._peers) == {second.location.rpartition("/")[2]})


async def test_a_listener_that_leaves_in_mid_speech_can_come_back(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    first = await listen(speaker)
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    await until(lambda: len(first.arrivals) >= 15)
    await first.connection.close()
    await until(lambda: not gateway.app[PEERS]._peers)
    second = await listen(speaker)
    await speaker.event("utterance.done")
    whole = -(-(len(engine.utterances[0].pcm) // 2 + 156) // 480)
    # It may be some packets until the gateway knows that the first has gone.
    await until(lambda: len(second.arrivals) >= whole - len(first.arrivals) - 20)
    async with gateway.delete(second.location) as response:
        assert response.status == 200
    await until(lambda: not gateway.app[PEERS]._peers)
    await speaker.send("ping")
    await speaker.event("pong")


async def test_a_sender_that_ends_closes_the_connection(connect, listen, gateway) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    await until(lambda: listener.silences)
    peer = gateway.app[PEERS].get(listener.location.rpartition("/")[2])
    peer._connection.getSenders()[0].track.stop()
    await asyncio.wait_for(listener.closed.wait(), PATIENCE_S)
    again = await listen(speaker)
    await speaker.say(SHORT)
    await until(lambda: len(again.arrivals) > 30)


async def test_the_session_takes_its_listener_along(connect, listen, gateway) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    await speaker.send("text.append", text=TEXT)
    await speaker.event("utterance.started")
    await speaker.close()
    await asyncio.wait_for(listener.closed.wait(), PATIENCE_S)
    await until(lambda: not gateway.app[PEERS]._peers)
    again = await connect("webrtc")
    await listen(again)
    assert (await again.say(SHORT))["reason"] == "end"


async def test_a_data_channel_in_the_offer_is_answered(connect, listen) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    assert "m=application" in listener.answer and "a=sendonly" in listener.answer
    await speaker.say(SHORT)
    await until(lambda: len(listener.arrivals) > 30)


async def test_format_changes_only_while_silent(connect, listen) -> None:
    speaker = await connect("webrtc")
    await listen(speaker)
    await speaker.send("text.append", text=SHORT)
    await speaker.send("session.update", audio={"format": "pcm_s16le"})
    assert (await speaker.event("error"))["code"] == "session_busy"
    await speaker.send("cancel")
    await speaker.event("utterance.cancelled")
    await speaker.send("session.update", audio={"format": "pcm_s16le"})
    await speaker.event("session.updated")
    await speaker.say(SHORT)
    assert speaker.pcm


async def test_a_machine_without_a_network_has_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aioice.ice.ifaddr, "get_adapters", list)
    ice.install()
    assert aioice.ice.get_host_addresses(True, True) == ["127.0.0.1"]


async def test_an_engine_too_slow_is_a_pause_and_no_loss(connect, listen, gateway, engine: StandInEngine) -> None:
    engine.frame_s = 0.13
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    await speaker.say(TEXT[:40])
    engine.frame_s = 0.004
    await speaker.say(SHORT)
    assert line(gateway, speaker).underruns > 5
    made = sum(len(made.pcm) // 2 for made in engine.utterances)
    await until(lambda: len(listener.arrivals) >= made // 480 - 2)
    assert made // 480 - 2 <= len(listener.arrivals) <= made // 480 + 4


async def test_a_stall_of_the_gateway_loses_nothing(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    await until(lambda: len(listener.arrivals) >= 25)
    time.sleep(0.4)  # noqa: ASYNC251 - a loop that is blocked is what is tested
    await speaker.event("utterance.done")
    await speaker.say(SHORT)
    assert line(gateway, speaker).underruns + line(gateway, speaker).stalls >= 1
    _, scores = align(listener.samples, bytes(engine.utterances[0].pcm))
    assert min(scores) >= 0.9


@pytest.mark.real_time
async def test_text_behind_an_idle_end_follows_without_a_gap(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    engine.cut_after = 12
    await speaker.send("text.append", text="Hello there, my")
    await speaker.send("text.append", text=" friend.")
    await speaker.send("text.end")
    await speaker.send("text.append", text="Another.")
    await speaker.send("text.end")
    dones = [await speaker.event("utterance.done") for _ in range(3)]
    assert [(done["utterance"], done["reason"], done["text"]) for done in dones] == [
        (1, "idle", "Hello there,"),
        (2, "end", " my friend."),
        (3, "end", "Another."),
    ]
    assert gapless(listener.arrivals, line(gateway, speaker))


async def test_cancel_of_a_later_utterance_leaves_the_one_that_sounds(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    for text in (TEXT, "Not this one.", "Nor this one."):
        await speaker.send("text.append", text=text)
        await speaker.send("text.end")
    await speaker.event("utterance.started")
    # They have numbers once the engine has begun them, which it does while the first still sounds.
    await until(lambda: len(engine.utterances) == 3)
    await speaker.send("cancel", utterance=2)
    for number in (2, 3):
        cancelled = await speaker.event("utterance.cancelled")
        assert (cancelled["utterance"], cancelled["heard_ms"], cancelled["heard_text"]) == (number, 0, "")
    done = await speaker.event("utterance.done")
    assert (done["utterance"], done["reason"], done["text"]) == (1, "end", TEXT)
    packets = -(-(len(engine.utterances[0].pcm) // 2 + 156) // 480)
    await until(lambda: len(listener.arrivals) >= packets - 2)
    await asyncio.sleep(0.2)
    assert packets - 2 <= len(listener.arrivals) <= packets
    await speaker.send("cancel", utterance=1)
    assert (await speaker.say("This one.")) == {"type": "utterance.done", "utterance": 4, "reason": "end", "duration_ms": 540, "text": "This one."}


async def test_a_tap_keeps_what_the_engine_made(gateway, connect, engine: StandInEngine, tmp_path: Path) -> None:
    sessions = gateway.app[SESSIONS]
    sessions._config = msgspec.structs.replace(sessions._config, tap=str(tmp_path))
    speaker = await connect()
    await speaker.say(SHORT)
    with wave.open(str(tmp_path / f"{speaker.created['session']}-1.wav")) as file:
        assert file.getframerate() == 24000
        assert file.readframes(1 << 20) == bytes(engine.utterances[0].pcm)
