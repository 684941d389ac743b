"""A WebSocket that breaks, and the session that goes on when its client is back. Real sockets."""

from __future__ import annotations

import asyncio
import itertools
import time

import aiohttp
import msgspec
import pytest

from gateway.config import GatewayConfig
from gateway.keys import CALLERS, DRAIN, OWNERS, SESSIONS
from tests.gateway.clients import PATIENCE_S, Speaker, until
from tests.gateway.matching import align
from tests.gateway.stand_in import StandInEngine

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards argue."
SHORT = "Just a few words."
RESUME_S = 2.0


@pytest.fixture
def config(config: GatewayConfig, request: pytest.FixtureRequest) -> GatewayConfig:
    """A client is back in time, unless a test says otherwise."""
    return msgspec.structs.replace(config, resume_s=getattr(request, "param", PATIENCE_S))


def cut(speaker: Speaker) -> None:
    """The network is gone, without a word of farewell."""
    speaker.socket._response.connection.transport.abort()  # type: ignore[union-attr]


async def noticed(gateway, count: int = 1) -> None:
    """The gateway knows that so many clients have gone."""
    await until(lambda: gateway.app[OWNERS].waiting == count)


def got(speaker: Speaker) -> int:
    """Messages that came."""
    return len(speaker.events) + speaker.frames


async def resume(gateway, speaker: Speaker, **query: object) -> Speaker:
    """The same client on a new socket; what it knows it keeps."""
    params = {"resume": speaker.created["resume"], "received": got(speaker), **query}
    speaker.socket = await gateway.ws_connect("/v1/speech", params={name: str(value) for name, value in params.items() if value is not None})
    assert (await speaker.event("session.resumed"))["session"] == speaker.created["session"]
    return speaker


async def refused(gateway, status: int, code: str, **query: object) -> str:
    """A resumption that is not to be; returns what is said."""
    params = {name: str(value) for name, value in query.items()}
    with pytest.raises(aiohttp.WSServerHandshakeError) as error:
        await gateway.ws_connect("/v1/speech", params=params)
    assert error.value.status == status
    async with gateway.get("/v1/speech", params=params) as response:
        body = await response.json()
    assert body["code"] == code
    return str(body["message"])


async def test_speech_goes_on_and_every_sample_comes_once(connect, gateway, engine: StandInEngine) -> None:
    speaker = await connect()
    for number in range(4):
        await speaker.send("text.append", text=f"{TEXT} {number}")
        await speaker.send("text.end")
    for _ in range(3):
        await asyncio.sleep(0.4)
        await speaker.event("playback")
        cut(speaker)
        await asyncio.sleep(0.3)
        await resume(gateway, speaker)
    while [event["type"] for event in speaker.events].count("utterance.done") < 4:
        await speaker.event("utterance.done")
    assert bytes(speaker.pcm) == b"".join(bytes(made.pcm) for made in engine.utterances)
    order = [(event["type"], event["utterance"]) for event in speaker.events if event["type"] in ("utterance.started", "utterance.done")]
    assert order == [(f"utterance.{what}", number) for number in (1, 2, 3, 4) for what in ("started", "done")]
    assert len(engine.utterances) == 4


async def test_what_the_network_lost_is_sent_again(connect, gateway, engine: StandInEngine) -> None:
    """It breaks with messages on their way: written by the gateway, and never read by the client."""
    speaker = await connect()
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    await asyncio.sleep(1.0)
    cut(speaker)
    await asyncio.sleep(0.2)
    await resume(gateway, speaker)
    await speaker.event("utterance.done")
    assert bytes(speaker.pcm) == bytes(engine.utterances[0].pcm)


async def test_text_written_meanwhile_is_said_once(connect, gateway, engine: StandInEngine) -> None:
    """The client sends again what the gateway says it did not get, and no more."""
    speaker = await connect()
    said = [("text.append", {"text": "One. "}), ("text.append", {"text": "Two. "}), ("text.append", {"text": "Three. "}), ("text.end", {})]
    messages = [("session.update", {}), *said]
    for kind, fields in said[:2]:
        await speaker.send(kind, **fields)
    await asyncio.sleep(0.2)
    cut(speaker)
    await noticed(gateway)
    await resume(gateway, speaker)
    for kind, fields in messages[speaker.events[-1]["received"] :]:
        await speaker.send(kind, **fields)
    await speaker.event("utterance.done")
    while "".join(event["text"] for event in speaker.events if event["type"] == "utterance.done") != "One. Two. Three. ":
        await speaker.event("utterance.done")
    assert "".join(utterance.text for utterance in engine.utterances) == "One. Two. Three. "


@pytest.mark.real_time
async def test_the_listener_hears_no_cut(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    await asyncio.sleep(0.5)
    cut(speaker)
    await asyncio.sleep(1.0)
    await resume(gateway, speaker)
    assert (await speaker.event("utterance.done"))["text"] == TEXT
    await speaker.say(SHORT)
    _, scores = align(listener.samples, bytes(engine.utterances[0].pcm))
    assert min(scores) >= 0.9
    times = sorted([*listener.silences, *listener.arrivals])
    line = gateway.app[SESSIONS].by_token(speaker.created["token"]).media
    assert sum((after[1] - before[1]) % 2**32 != 960 for before, after in itertools.pairwise(times)) <= line.underruns + line.stalls
    progress = [event["spoken_ms"] for event in speaker.events if event["type"] == "utterance.progress" and event["utterance"] == 1]
    assert progress == sorted(set(progress)), "what is out of date is not told"


@pytest.mark.real_time
@pytest.mark.parametrize("config", [RESUME_S], indirect=True)
async def test_a_session_that_waits_counts_and_then_is_freed(connect, gateway, engine: StandInEngine) -> None:
    speaker = await connect()
    await speaker.send("text.append", text=f"{TEXT} {TEXT}")
    await speaker.event("utterance.started")
    cut_s = time.monotonic()
    cut(speaker)
    app = gateway.app
    await noticed(gateway)
    assert (app[SESSIONS].count, app[CALLERS].open) == (1, 1)
    await until(lambda: not app[CALLERS].open)
    assert RESUME_S - 0.1 < time.monotonic() - cut_s < RESUME_S + 0.5
    assert (app[SESSIONS].count, app[OWNERS].waiting) == (0, 0)
    await until(lambda: engine.utterances[0].cancelled)
    assert "open another" in await refused(gateway, 404, "session_over", resume=speaker.created["resume"])


async def test_sessions_that_wait_are_counted(connect, gateway) -> None:
    speaker = await connect()
    cut(speaker)
    await noticed(gateway)
    async with gateway.get("/metrics") as response:
        assert "vivavoce_sessions_waiting 1.0" in await response.text()


async def test_a_client_that_closes_its_socket_is_not_waited_for(connect, gateway) -> None:
    speaker = await connect()
    await speaker.close()
    await until(lambda: gateway.app[SESSIONS].count == 0)
    await refused(gateway, 404, "session_over", resume=speaker.created["resume"])


async def test_tokens_that_do_not_do(connect, gateway) -> None:
    one, other = await connect(), await connect()
    cut(one)
    await noticed(gateway)
    ident, _, secret = one.created["resume"].partition(".")
    assert "listeners" in await refused(gateway, 401, "bad_resume_token", resume=one.created["token"])
    await refused(gateway, 401, "bad_resume_token", resume=f"{ident}.{other.created['resume'].partition('.')[2]}")
    await refused(gateway, 401, "bad_resume_token", resume=f"{ident}.\u00e9")
    await refused(gateway, 404, "session_over", resume=f"nobody.{secret}")
    await refused(gateway, 404, "session_over", resume="")
    await refused(gateway, 400, "invalid_request", resume=one.created["resume"], received="some")
    assert "2 messages were sent" in await refused(gateway, 400, "invalid_request", resume=one.created["resume"], received=3)
    await resume(gateway, one)
    await one.say(SHORT)
    await other.say(SHORT)


async def test_a_session_with_an_open_socket_is_held(connect, gateway) -> None:
    speaker = await connect()
    reading = asyncio.create_task(speaker.event("utterance.done"))
    assert "close that one first" in await refused(gateway, 409, "session_held", resume=speaker.created["resume"])
    await speaker.send("text.append", text=SHORT)
    await speaker.send("text.end")
    assert (await reading)["text"] == SHORT


async def test_a_socket_with_nobody_behind_it_is_let_go(connect, gateway, engine: StandInEngine) -> None:
    """The network broke and only the client knows."""
    speaker = await connect()
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    silent = speaker.socket._response
    await resume(gateway, speaker)
    await speaker.event("utterance.done")
    assert bytes(speaker.pcm) == bytes(engine.utterances[0].pcm)
    await until(lambda: silent.connection is None or silent.connection.transport is None or silent.connection.transport.is_closing())
    await speaker.say(SHORT)


async def test_a_request_that_is_no_websocket_takes_nothing_over(connect, gateway) -> None:
    speaker = await connect()
    cut(speaker)
    await noticed(gateway)
    async with gateway.get("/v1/speech", params={"resume": speaker.created["resume"]}) as response:
        assert response.status == 400
    await resume(gateway, speaker)
    await speaker.say(SHORT)


async def test_more_than_is_kept_is_told(connect, gateway) -> None:
    speaker = await connect()
    outbox = gateway.app[OWNERS].by_token(speaker.created["resume"])._outbox
    outbox.MAX_KEPT_BYTES = 50_000
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    await asyncio.sleep(1.0)
    before = got(speaker)
    cut(speaker)
    await noticed(gateway)
    assert "leave `received` out" in await refused(gateway, 410, "messages_lost", resume=speaker.created["resume"], received=before)
    await resume(gateway, speaker, received=None)
    await speaker.say(SHORT)


async def test_a_drain_does_not_wait_for_who_may_not_come_back(connect, gateway) -> None:
    speaker = await connect()
    cut(speaker)
    await noticed(gateway)
    await asyncio.wait_for(gateway.app[DRAIN].run(3 * PATIENCE_S), PATIENCE_S / 2)
    assert gateway.app[SESSIONS].count == 0
