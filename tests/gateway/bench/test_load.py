"""The client against servers whose delays, gaps and refusals are known: it must find just these."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import aiohttp
import msgspec
import pytest

from engine import Overloaded
from gateway.bench.ear import Ear
from gateway.bench.load import Request, Result, Share, run_share
from gateway.bench.outcome import Summary
from gateway.bench.speakers import Target
from gateway.config import GatewayConfig
from tests.gateway.bench.scripted import RATE, Answer, ScriptedServer, tone
from tests.gateway.conftest import Client, serving
from tests.gateway.stand_in import StandInEngine

pytestmark = pytest.mark.real_time
SLACK_S = 0.5
"""What a machine may be late that runs other things as well."""
TEXT = "Hello there, listener."


async def load(url: str, count: int, *, every_s: float = 0.01, **fields: object) -> Result:
    target = Target(url, **fields)  # type: ignore[arg-type]
    return await run_share(Share(target, time.monotonic(), [Request(n, every_s * n, TEXT) for n in range(count)]))


def pieces(seconds: Sequence[float], every_s: float, dbfs: float = -20.0) -> list[tuple[float, bytes]]:
    return [(every_s, tone(length_s, dbfs)) for length_s in seconds]


async def test_delays_are_found_as_they_were() -> None:
    script = Answer([(0.1, tone(0.08, -100.0)), (0.15, tone(0.08)), (0.0, tone(1.0))])
    async with ScriptedServer(lambda number: script) as server:
        begin_s = time.monotonic()
        result = await load(server.url, 5, every_s=0.1)
    for outcome, served in zip(result.outcomes, server.served, strict=True):
        assert outcome.status == "ok" and outcome.first_byte_s is not None and outcome.audible_s is not None
        # By the server's clock, which is the same.
        first_s, audible_s = (at_s - served.asked_s for at_s in served.written_s[:2])
        assert 0.1 <= first_s <= outcome.first_byte_s <= first_s + SLACK_S
        assert 0.25 <= audible_s <= outcome.audible_s <= audible_s + SLACK_S
        assert outcome.lead_s == pytest.approx(0.07) and outcome.audio_s == pytest.approx(1.16)
        assert audible_s <= outcome.took_s <= audible_s + SLACK_S
        assert 0 <= outcome.sent_s - outcome.planned_s < SLACK_S and served.asked_s - begin_s >= outcome.planned_s


async def test_gaps_are_found_each_of_them() -> None:
    async with ScriptedServer(lambda number: Answer(pieces([0.08] * 5, 0.2))) as server:
        result = await load(server.url, 3)
    for outcome in result.outcomes:
        assert outcome.status == "ok" and outcome.underruns == 4
        assert 4 * 0.12 - 0.05 <= outcome.gap_s <= 4 * 0.12 + SLACK_S
    assert Summary.of(result.outcomes).underrun == 3


async def test_sound_that_comes_quicker_than_it_is_heard_has_no_gaps() -> None:
    async with ScriptedServer(lambda number: Answer(pieces([0.5] * 5, 0.02))) as server:
        result = await load(server.url, 3)
    assert [outcome.underruns for outcome in result.outcomes] == [0, 0, 0]


async def test_refusals_and_failures_are_told_apart() -> None:
    good = pieces([0.2], 0.0)
    script = [
        Answer(good),
        Answer(status=429),
        Answer(status=503),
        Answer(status=400),
        Answer(good, broken=True),
        Answer(),
        Answer([(0.0, tone(0.5, -100.0))]),
    ]
    async with ScriptedServer(lambda number: script[number]) as server:
        result = await load(server.url, len(script), every_s=0.05)
    assert [outcome.status for outcome in result.outcomes] == ["ok", "refused", "refused", "failed", "failed", "failed", "failed"]
    whys = [outcome.why for outcome in result.outcomes]
    assert whys[1].startswith("429: ") and "as it was told" in whys[1] and whys[3].startswith("400: ")
    assert whys[4].startswith("ClientPayloadError") and whys[5] == "the answer was empty" and whys[6] == "the answer held no sound"
    assert result.outcomes[4].audio_s == pytest.approx(0.2)


async def test_nobody_waits_for_those_before() -> None:
    async with ScriptedServer(lambda number: Answer(pieces([0.1], 4.0))) as server:
        await load(server.url, 20)
    assert server.most_at_once == 20


async def test_a_server_that_is_not_there_is_a_failure_of_every_request() -> None:
    result = await load("http://127.0.0.1:9", 2)
    assert [outcome.status for outcome in result.outcomes] == ["failed", "failed"]
    assert "ClientConnector" in result.outcomes[0].why


async def test_what_is_asked_is_what_other_servers_take() -> None:
    async with ScriptedServer(lambda number: Answer(pieces([0.1], 0.0))) as server:
        await load(server.url, 1)
        await load(server.url, 1, model="m", voice="v", api_key="secret", body={"language": "English", "stream": None})
    plain, full = server.served
    assert plain.body == {"input": TEXT, "response_format": "pcm", "stream": True} and "Authorization" not in plain.headers
    assert full.body == {"model": "m", "voice": "v", "input": TEXT, "response_format": "pcm", "language": "English"}
    assert full.headers["Authorization"] == "Bearer secret"


async def test_a_client_that_is_held_up_says_so() -> None:
    async def hold_up() -> None:
        while True:
            time.sleep(0.03)  # noqa: ASYNC251 - just that is what the client must notice
            await asyncio.sleep(0)

    async with ScriptedServer(lambda number: Answer(pieces([0.1], 0.0))) as server:
        busy = asyncio.create_task(hold_up())
        try:
            result = await load(server.url, 20)
        finally:
            busy.cancel()
    assert result.health.was_late and result.health.lag_ms.p99 > 15


async def test_listeners_are_told_the_next_when_they_have_heard_the_last() -> None:
    async with ScriptedServer(lambda number: Answer(pieces([0.3], 0.02))) as server:
        listeners = [Request(number, 0.05 * number, "") for number in range(3)]
        share = Share(Target(server.url), time.monotonic(), listeners=listeners, texts=["One.", "Two.", "Three."], until_s=2.0)
        result = await run_share(share)
    assert server.most_at_once <= 3
    for number in range(3):
        own = [outcome for outcome in result.outcomes if outcome.number % 1_000_000 == number]
        own.sort(key=lambda outcome: outcome.sent_s)
        assert 2 <= len(own) <= 7 and {outcome.status for outcome in own} == {"ok"}
        for last, following in itertools.pairwise(own):
            assert following.sent_s >= last.sent_s + 0.3
        assert [outcome.text for outcome in own] == [("One.", "Two.", "Three.")[(number + turn) % 3] for turn in range(len(own))]


# Against our own gateway, before an engine that needs a known time for each frame


def url(gateway: Client) -> str:
    return str(gateway.make_url("")).rstrip("/")


@pytest.mark.parametrize("mode", ["http", "socket"])
async def test_the_gateway_and_an_engine_of_known_speed(gateway: Client, engine: StandInEngine, mode: str) -> None:
    engine.frame_s = 0.03
    result = await load(url(gateway), 4, every_s=0.2, mode=mode, voice="ryan")
    for outcome in result.outcomes:
        # 50 ms are gained a frame: only a machine that stands still leaves a gap.
        assert outcome.status == "ok" and outcome.gap_s < SLACK_S, outcome
        assert outcome.audio_s == pytest.approx(len(TEXT) * 0.060)
        assert outcome.first_byte_s is not None and 0.03 <= outcome.first_byte_s < 0.03 + SLACK_S
    assert [making.text for making in engine.utterances] == [TEXT] * 4
    assert {making.request.pace for making in engine.utterances} == {"live"} and {making.request.live for making in engine.utterances} == {
        mode == "socket"
    }


@pytest.mark.parametrize("mode", ["http", "socket"])
async def test_an_engine_slower_than_speech_leaves_gaps(gateway: Client, engine: StandInEngine, mode: str) -> None:
    engine.frame_s = 0.16
    [outcome] = (await load(url(gateway), 1, mode=mode)).outcomes
    frames = -(-round(len(TEXT) * 0.060 * RATE) // 1920)
    assert outcome.status == "ok" and outcome.underruns >= frames - 3
    assert outcome.gap_s >= (frames - 3) * 0.06


@pytest.mark.parametrize("mode", ["http", "socket"])
async def test_an_engine_without_room_is_a_refusal(gateway: Client, engine: StandInEngine, mode: str) -> None:
    engine.refusal = Overloaded("64 utterances are waiting already", retry_after_s=2.0)
    result = await load(url(gateway), 3, mode=mode)
    assert [outcome.status for outcome in result.outcomes] == ["refused"] * 3
    assert "64 utterances are waiting" in result.outcomes[0].why


@pytest.mark.parametrize(("every_s", "sessions"), [(3.0, 1), (0.5, 2)])
async def test_a_session_is_kept_for_the_next_text_once_the_last_has_been_heard(
    gateway: Client, engine: StandInEngine, monkeypatch: pytest.MonkeyPatch, every_s: float, sessions: int
) -> None:
    """TEXT takes 1.3 s to be heard: a second one after half a second would wait in its session for the listener to be done with the first."""
    engine.frame_s = 0.001
    opened: list[str] = []
    connect = aiohttp.ClientSession.ws_connect

    def counted(self: aiohttp.ClientSession, url: str, **options: object) -> object:
        opened.append(url)
        return connect(self, url, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(aiohttp.ClientSession, "ws_connect", counted)
    share = Share(Target(url(gateway), "socket"), time.monotonic(), [Request(n, every_s * n, TEXT) for n in range(2)])
    result = await run_share(share)
    assert [outcome.status for outcome in result.outcomes] == ["ok", "ok"] and len(opened) == sessions


async def test_an_unknown_voice_fails_with_what_the_gateway_said(gateway: Client) -> None:
    [outcome] = (await load(url(gateway), 1, mode="socket", voice="nobody")).outcomes
    assert outcome.status == "failed" and "nobody" in outcome.why


# By WebRTC


async def test_packets_are_heard_as_they_come(gateway: Client, engine: StandInEngine) -> None:
    engine.frame_s = 0.03
    result = await load(url(gateway), 2, every_s=0.3, mode="webrtc", voice="ryan")
    for outcome in result.outcomes:
        assert outcome.status == "ok" and outcome.gap_s < SLACK_S, outcome
        # In packets of 20 ms, and the codec's delay behind it.
        assert len(TEXT) * 0.060 - 0.02 <= outcome.audio_s <= len(TEXT) * 0.060 + 0.06
        assert outcome.audible_s is not None and 0.03 <= outcome.audible_s < 0.2 + SLACK_S
        # Speech leaves at the pace at which it is heard.
        assert outcome.took_s > len(TEXT) * 0.060 - 0.2


async def test_silence_in_mid_speech_is_a_gap(gateway: Client, engine: StandInEngine) -> None:
    engine.frame_s = 0.24
    [outcome] = (await load(url(gateway), 1, mode="webrtc")).outcomes
    frames = -(-round(len(TEXT) * 0.060 * RATE) // 1920)
    assert outcome.status == "ok" and outcome.underruns >= frames - 4
    assert outcome.gap_s >= (frames - 4) * 0.1


async def test_sessions_and_their_listeners_are_kept(gateway: Client, engine: StandInEngine) -> None:
    engine.frame_s = 0.001
    share = Share(Target(url(gateway), "webrtc"), time.monotonic(), [Request(n, 3.0 * n, "Hello.") for n in range(2)], keep_pcm=True)
    result = await run_share(share)
    assert [outcome.status for outcome in result.outcomes] == ["ok", "ok"]
    # 48 kHz, two bytes a sample.
    assert [len(result.pcm[number]) / 96_000 for number in range(2)] == [pytest.approx(o.audio_s) for o in result.outcomes]


async def test_a_listener_is_not_taken_for_gone(config: GatewayConfig, engine: StandInEngine) -> None:
    engine.frame_s = 0.001
    async with serving(msgspec.structs.replace(config, silent_s=2.0)) as gateway:
        share = Share(Target(url(gateway), "webrtc"), time.monotonic(), [Request(0, 0.0, "It goes on and on. " * 5)])
        [outcome] = (await run_share(share)).outcomes
    assert outcome.status == "ok" and outcome.audio_s > 5.0 and outcome.underruns == 0


async def test_a_session_whose_listener_has_gone_is_not_used_again(gateway: Client, engine: StandInEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.frame_s = 0.001
    ears: list[Ear] = []
    hear = Ear.connect

    async def counted(self: Ear, *arguments: object) -> None:
        await hear(self, *arguments)  # type: ignore[arg-type]
        ears.append(self)

    monkeypatch.setattr(Ear, "connect", counted)
    share = Share(Target(url(gateway), "webrtc"), time.monotonic(), [Request(n, 3.0 * n, "Hello.") for n in range(2)])
    running = asyncio.create_task(run_share(share))
    await asyncio.sleep(1.5)
    await ears[0].close()
    assert [outcome.status for outcome in (await running).outcomes] == ["ok", "ok"] and len(ears) == 2
