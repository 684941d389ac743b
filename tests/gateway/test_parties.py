"""Who else takes part in a session: a second listener, one that comes back, a pipeline that offers to send as well, a PCM listener that reports."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.contrib.media import MediaBlackhole
from aiortc.mediastreams import AudioStreamTrack

from gateway.media.playout import Playout
from tests.gateway.clients import PATIENCE_S, Listener, until
from tests.gateway.matching import align
from tests.gateway.stand_in import RATE, StandInEngine

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards argue."
LONG = f"{TEXT} {TEXT}"
SHORT = "Just a few words."


def bearer(speaker) -> dict[str, str]:
    return {"Authorization": f"Bearer {speaker.created['token']}", "Content-Type": "application/sdp"}


async def start(speaker, text: str) -> None:
    await speaker.send("text.append", text=text)
    await speaker.send("text.end")
    await speaker.event("utterance.started")


async def test_a_second_listener_is_refused_where_the_session_says_so(connect, listen, gateway) -> None:
    speaker = await connect("webrtc")
    await speaker.send("session.update", listeners="refuse")
    assert (await speaker.event("session.updated"))["listeners"] == "refuse"
    first = await listen(speaker)
    other = Listener(gateway)
    offer = await other.offer()
    async with gateway.post("/v1/whep", data=offer, headers=bearer(speaker)) as response:
        assert response.status == 409 and "listeners: refuse" in (await response.json())["detail"]
    ident = first.location.rpartition("/")[2]
    async with gateway.post("/v1/whep", data=offer, headers=bearer(speaker) | {"Vivavoce-Former-Listener": ident[:-1]}) as response:
        assert response.status == 409, "not who it says it was"
    await speaker.say(SHORT)
    await until(lambda: len(first.arrivals) > 30)
    # The same listener on a new connection is no other; and when it has gone, another may come.
    again = await listen(speaker, headers={"Vivavoce-Former-Listener": ident})
    async with gateway.delete(again.location) as response:
        assert response.status == 200
    third = await listen(speaker)
    await speaker.say(SHORT)
    await until(lambda: len(third.arrivals) > 30)
    await other.close()


async def test_an_unknown_rule_for_listeners(connect) -> None:
    speaker = await connect("webrtc")
    await speaker.send("session.update", listeners="several")
    error = await speaker.event("error")
    assert error["code"] == "invalid_event" and "listeners" in error["message"] and "replace, refuse" in error["message"]


@pytest.mark.parametrize("played", [40, 60])
async def test_a_listener_that_is_back_goes_on_behind_what_it_played(connect, listen, engine: StandInEngine, played: int) -> None:
    speaker = await connect("webrtc")
    first = await listen(speaker)
    await start(speaker, TEXT)
    while len(first.arrivals) < 70:  # noqa: ASYNC110 - packets tell nobody
        await asyncio.sleep(0.01)
    former = {"Vivavoce-Former-Listener": first.location.rpartition("/")[2], "Vivavoce-Played-Rtp-Time": str(first.arrivals[played - 1][1])}
    second = await listen(speaker, headers=former)
    await speaker.event("utterance.done")
    await speaker.say(SHORT)
    rest = bytes(engine.utterances[0].pcm)[960 * played :]
    _, scores = align(second.samples, rest)
    assert min(scores) >= 0.7 and sorted(scores)[len(scores) // 2] >= 0.9
    packets = -(-(len(engine.utterances[0].pcm) // 2 + 156) // 480) + -(-(len(engine.utterances[1].pcm) // 2 + 156) // 480)
    await until(lambda: len(second.arrivals) >= packets - played - 2)
    assert len(second.arrivals) <= packets - played


async def test_what_somebody_else_played_moves_nothing(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    first = await listen(speaker)
    await start(speaker, TEXT)
    await until(lambda: len(first.arrivals) >= 40)
    second = await listen(speaker, headers={"Vivavoce-Former-Listener": "somebody", "Vivavoce-Played-Rtp-Time": str(first.arrivals[0][1])})
    await speaker.event("utterance.done")
    made = len(engine.utterances[0].pcm) // 2 // 480
    assert len(first.arrivals) + len(second.arrivals) < made + 10
    async with gateway.post("/v1/whep", data="v=0", headers=bearer(speaker) | {"Vivavoce-Played-Rtp-Time": "-5"}) as response:
        assert response.status == 400 and "Vivavoce-Played-Rtp-Time" in (await response.json())["detail"]


async def test_a_pipeline_that_offers_to_send_as_well(connect, gateway, engine: StandInEngine) -> None:
    """A plain aiortc client with a microphone of its own: sendrecv in the offer, and a data channel of its own making."""
    speaker = await connect("webrtc")
    connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    heard, sink = [], MediaBlackhole()

    def on_track(track) -> None:
        heard.append(track)
        sink.addTrack(track)

    connection.add_listener("track", on_track)
    connection.addTrack(AudioStreamTrack())
    channel = connection.createDataChannel("events")
    said: list[dict[str, object]] = []
    channel.add_listener("message", lambda message: said.append(json.loads(message)))
    await connection.setLocalDescription(await connection.createOffer())
    assert "a=sendrecv" in connection.localDescription.sdp
    async with gateway.post("/v1/whep", data=connection.localDescription.sdp, headers=bearer(speaker)) as response:
        assert response.status == 201
        answer = await response.text()
    assert "a=sendonly" in answer and "a=sendrecv" not in answer.partition("m=application")[0]
    await connection.setRemoteDescription(RTCSessionDescription(answer, "answer"))
    await sink.start()
    await until(lambda: channel.readyState == "open")
    done = await speaker.say(TEXT)
    assert (done["reason"], len(heard)) == ("end", 1)
    async with asyncio.timeout(PATIENCE_S):
        received = 0
        while received <= len(engine.utterances[0].pcm) // 960 - 5:
            stats = (await connection.getReceivers()[0].getStats()).values()
            received = sum(entry.packetsReceived for entry in stats if entry.type == "inbound-rtp")
    await until(lambda: any(event["type"] == "utterance.done" for event in said))
    assert [event["type"] for event in said if event["type"] in ("utterance.started", "utterance.done")] == ["utterance.started", "utterance.done"]
    channel.send(json.dumps({"type": "text.append", "text": "Me too."}))
    await until(lambda: any(event["type"] == "error" for event in said))
    assert next(event for event in said if event["type"] == "error")["code"] == "not_allowed"
    assert len(engine.utterances) == 1
    await sink.stop()
    await connection.close()


async def test_a_pcm_listener_that_reports_is_believed(connect, engine: StandInEngine) -> None:
    """It plays a second late, then stands still: the engine is told, and so is it."""
    speaker = await connect()
    await start(speaker, LONG)
    assert not (await speaker.event("playback"))["measured"]
    begun_s = asyncio.get_running_loop().time()
    played_ms = 0.0

    async def play() -> None:
        nonlocal played_ms
        while True:
            played_ms = min(max(0.0, (asyncio.get_running_loop().time() - begun_s - 1.0) * 1000), 1500)
            await speaker.send("playback", utterance=1, played_ms=played_ms, buffered_ms=700)
            await asyncio.sleep(0.1)

    playing = asyncio.create_task(play())
    # On a machine that stands still its word may be old for a moment.
    told = await speaker.event("playback")
    while not (told["measured"] and 500 <= told["buffered_ms"] <= 700 and told["dry_in_ms"] > 1500):
        told = await speaker.event("playback")
    reports = engine.utterances[0].playbacks
    await until(lambda: reports[-1].measured and reports[-1].heard > 0.7 * RATE)
    assert any(report.measured and report.playing for report in reports)
    # Without its word it would be further and further.
    await until(lambda: not reports[-1].playing and abs(reports[-1].heard - 1.5 * RATE) < 100)
    await speaker.send("cancel")
    cancelled = await speaker.event("utterance.cancelled")
    assert cancelled["measured"] and cancelled["heard_ms"] == 1500
    playing.cancel()


@pytest.mark.parametrize(
    ("audio", "fields", "code", "about"),
    [
        ("pcm_s16le", {"utterance": 7, "played_ms": 1}, "invalid_event", "count from 1"),
        ("pcm_s16le", {"utterance": 1, "played_ms": -1}, "invalid_event", "played_ms"),
        ("pcm_s16le", {"played_ms": 1}, "invalid_event", "utterance"),
        ("webrtc", {"utterance": 1, "played_ms": 1}, "not_allowed", "data channel"),
    ],
)
async def test_a_report_that_cannot_be(connect, audio: str, fields: dict[str, object], code: str, about: str) -> None:
    speaker = await connect(audio)
    await speaker.send("playback", **fields)
    error = await speaker.event("error")
    assert error["code"] == code and "playback" in error["message"] and about in error["message"]


def test_no_word_makes_a_pcm_listener_drier_than_one_that_never_waited() -> None:
    chance = random.Random(3)
    for _ in range(300):
        honest, liar, now_s = Playout(RATE), Playout(RATE), 100.0
        for _ in range(40):
            now_s += chance.uniform(0.0, 0.3)
            if chance.random() < 0.5:
                samples = chance.randrange(1, 12000)
                honest.sent(1, samples, now_s)
                liar.sent(1, samples, now_s)
            else:
                liar.report(chance.randrange(1, 3), chance.randrange(0, 300_000), chance.uniform(0, 9), now_s)
            assert liar.heard(1, now_s) <= honest.heard(1, now_s) + 1
            assert liar.unplayed_s(now_s) >= honest.unplayed_s(now_s) - 1e-3
