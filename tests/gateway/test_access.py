"""Who may speak, from where, and how much: keys, tokens, origins, limits. Every refusal says what to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import jwt
import msgspec
import pytest
from aiohttp import WSCloseCode, WSMsgType, WSServerHandshakeError
from aiohttp.test_utils import TestClient

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.keys import CALLERS
from gateway.limits import Bucket, Callers
from gateway.pool import EnginePool
from gateway.refusal import Refusal
from tests.gateway.clients import Speaker, until
from tests.gateway.conftest import Client, Server

KEY = "correct-horse-battery-staple"
OTHER = "a-second-key-for-somebody-else"
SPEECH = {"model": "tts-1", "voice": "alloy", "input": "Hello.", "response_format": "pcm"}

Start = Callable[..., Awaitable[Client]]


@pytest.fixture
async def start(config: GatewayConfig) -> AsyncIterator[Start]:
    """`await start(api_keys=[KEY])`: a gateway with these settings."""
    async with AsyncExitStack() as stack:

        async def started(**settings: object) -> Client:
            changed = msgspec.structs.replace(config, **settings)
            engines = await stack.enter_async_context(EnginePool(changed))
            client = await stack.enter_async_context(TestClient(Server(create_app(changed, engines))))
            await engines.first_start()
            return client

        yield started


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def refused(client: Client, headers: dict[str, str] | None = None, query: str = "") -> dict[str, Any]:
    """The status and body of a WebSocket that is not let in."""
    async with client.get(f"/v1/speech{query}", headers=headers) as response:
        assert response.content_type == "application/json"
        return {"status": response.status, "headers": response.headers, **await response.json()}


async def token_of(client: Client, body: object = None, key: str = KEY) -> str:
    async with client.post("/v1/tokens", headers=bearer(key), json=body) as response:
        assert response.status == 200 and response.headers["Cache-Control"] == "no-store"
        return str((await response.json())["token"])


async def test_without_keys_nobody_needs_one(start: Start) -> None:
    client = await start()
    speaker = Speaker(await client.ws_connect("/v1/speech", headers=bearer("none")))
    await speaker.event("session.created")
    async with client.post("/v1/audio/speech", json=SPEECH, headers=bearer("none")) as response:
        assert response.status == 200 and len(await response.read()) > 1000
    await speaker.close()


async def test_a_key_opens_everything(start: Start) -> None:
    client = await start(api_keys=[KEY, OTHER])
    for key in (KEY, OTHER):
        speaker = Speaker(await client.ws_connect("/v1/speech", headers=bearer(key)))
        await speaker.event("session.created")
        await speaker.close()
        for path in ("/v1/models", "/v1/audio/voices", "/metrics"):
            async with client.get(path, headers=bearer(key)) as response:
                assert response.status == 200, path
        async with client.post("/v1/audio/speech", json=SPEECH, headers=bearer(key)) as response:
            assert response.status == 200


@pytest.mark.parametrize("headers", [{}, bearer(""), bearer("wrong"), bearer(KEY[:-1]), {"Authorization": f"Basic {KEY}"}, bearer("\u00e9")])
async def test_without_the_key_nothing_opens(start: Start, headers: dict[str, str]) -> None:
    client = await start(api_keys=[KEY])
    no = await refused(client, headers)
    assert (no["status"], no["code"], no["retryable"], no["headers"]["WWW-Authenticate"]) == (401, "unauthorized", False, "Bearer")
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/audio/voices"), ("POST", "/v1/audio/speech")):
        async with client.request(method, path, headers=headers, json=SPEECH if method == "POST" else None) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"], error["code"]) == (401, "authentication_error", "unauthorized")
    for method, path in (("GET", "/metrics"), ("POST", "/v1/tokens")):
        async with client.request(method, path, headers=headers) as response:
            assert (response.status, (await response.json())["code"]) == (401, "unauthorized")
    for path in ("/health", "/ready", "/"):
        async with client.get(path) as response:
            assert response.status == 200
    # A key in an address ends up in logs: only tokens may stand there.
    assert (await refused(client, {}, f"?token={KEY}"))["status"] == 401


async def test_a_token_opens_sessions_until_it_expires(start: Start) -> None:
    client = await start(api_keys=[KEY], session_secret="0123456789abcdef0123456789abcdef")
    token = await token_of(client)
    for headers, query in (({}, f"?token={token}"), (bearer(token), "")):
        speaker = Speaker(await client.ws_connect(f"/v1/speech{query}", headers=headers))
        await speaker.event("session.created")
        await speaker.close()
    # It is no key: it makes no tokens and reads no metrics.
    async with client.post("/v1/tokens", headers=bearer(token)) as response:
        assert response.status == 401 and "API key" in (await response.json())["message"]
    brief = await token_of(client, {"ttl_s": 1})
    await asyncio.sleep(2.1)
    no = await refused(client, {}, f"?token={brief}")
    assert (no["status"], no["code"]) == (401, "token_expired") and "POST /v1/tokens" in no["message"]


async def test_tokens_that_are_not_ours(start: Start) -> None:
    secret = "0123456789abcdef0123456789abcdef"
    client = await start(api_keys=[KEY], session_secret=secret)
    claims = jwt.decode(await token_of(client), options={"verify_signature": False})
    later = {"exp": int(time.time()) + 100}
    forged = [
        jwt.encode(claims, "another secret, just as long as it", "HS256"),
        jwt.encode(claims | {"aud": "someone"}, secret, "HS256"),
        jwt.encode(claims | {"sub": "key-00000000"} | later, secret, "HS256"),
        jwt.encode({name: value for name, value in claims.items() if name != "exp"}, secret, "HS256"),
        jwt.encode(claims, None, "none"),
        "x.y.z",
    ]
    for token in forged:
        assert (await refused(client, {}, f"?token={token}"))["code"] == "unauthorized", token
    speaker = Speaker(await client.ws_connect(f"/v1/speech?token={jwt.encode(claims | later, secret, 'HS256')}"))
    await speaker.event("session.created")
    await speaker.close()


@pytest.mark.parametrize(("body", "says"), [({"ttl_s": 301}, "ttl_s: 301"), ({"ttl_s": 0}, "ttl_s"), ({"ttl_s": "x"}, "ttl_s"), ([], "object")])
async def test_a_token_asked_for_wrongly(start: Start, body: object, says: str) -> None:
    client = await start(api_keys=[KEY])
    async with client.post("/v1/tokens", headers=bearer(KEY), json=body) as response:
        told = await response.json()
    assert (response.status, told["code"]) == (400, "invalid_request") and says in told["message"]


async def test_pages_of_other_origins_may_not_speak(start: Start) -> None:
    client = await start(allowed_origins=["https://app.example.com"], public_url="https://voice.example.com/base/")
    own = str(client.make_url("/").origin())
    for origin in (own, "https://app.example.com", "https://voice.example.com"):
        speaker = Speaker(await client.ws_connect("/v1/speech", headers={"Origin": origin}))
        await speaker.event("session.created")
        await speaker.close()
    for origin in (
        "https://evil.example",
        "https://app.example.com.evil.example",
        "http://app.example.com",
        "null",
        own.rpartition(":")[0],
        "https://",
    ):
        no = await refused(client, {"Origin": origin})
        assert (no["status"], no["code"]) == (403, "origin_not_allowed") and "allowed_origins" in no["message"], origin
        async with client.post("/v1/audio/speech", json=SPEECH, headers={"Origin": origin}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (403, "origin_not_allowed")


async def test_a_page_of_an_allowed_origin_may_read_what_it_asks_for(start: Start) -> None:
    client = await start(allowed_origins=["https://app.example.com"], api_keys=[KEY])
    page, asks = {"Origin": "https://app.example.com"}, {"Access-Control-Request-Method": "POST"}
    async with client.options("/v1/audio/speech", headers=page | asks) as response:
        assert response.status == 204 and response.headers["Access-Control-Allow-Origin"] == page["Origin"]
        assert "POST" in response.headers["Access-Control-Allow-Methods"] and "Authorization" in response.headers["Access-Control-Allow-Headers"]
    async with client.post("/v1/audio/speech", json=SPEECH, headers=page | bearer(KEY)) as response:
        assert response.status == 200 and response.headers["Access-Control-Allow-Origin"] == page["Origin"] and response.headers["Vary"] == "Origin"
    # Why it was refused, too.
    async with client.get("/v1/models", headers=page) as response:
        assert response.status == 401 and response.headers["Access-Control-Allow-Origin"] == page["Origin"]
    async with client.get("/v1/models", headers=bearer(KEY)) as response:
        assert response.status == 200 and "Access-Control-Allow-Origin" not in response.headers
    for path, method in (("/v1/audio/speech", "OPTIONS"), ("/v1/models", "GET")):
        async with client.request(method, path, headers={"Origin": "https://evil.example"} | bearer(KEY)) as response:
            assert response.status == 403 and "Access-Control-Allow-Origin" not in response.headers


async def test_a_name_made_to_point_here_is_not_our_own_origin(start: Start) -> None:
    rebound = {"Origin": "http://evil.example:8808", "Host": "evil.example:8808"}
    assert (await refused(await start(), rebound))["status"] == 403
    # With a key it does not matter: such a page has none.
    assert (await refused(await start(api_keys=[KEY]), rebound))["status"] == 401
    client = await start(allowed_origins=["*"])
    speaker = Speaker(await client.ws_connect("/v1/speech", headers=rebound))
    await speaker.event("session.created")
    await speaker.close()


async def test_sessions_of_one_caller_and_of_all(start: Start) -> None:
    client = await start(api_keys=[KEY, OTHER], max_caller_sessions=2, max_sessions=3)
    opened = [await client.ws_connect("/v1/speech", headers=bearer(key)) for key in (KEY, KEY, OTHER)]
    no = await refused(client, bearer(OTHER))
    assert (no["status"], no["code"], no["headers"]["Retry-After"]) == (503, "too_many_sessions", "5") and "max_sessions" in no["message"]
    await opened.pop().close()
    await until(lambda: client.app[CALLERS].open == 2)
    no = await refused(client, bearer(KEY))
    assert (no["status"], no["code"], no["retryable"]) == (429, "too_many_sessions", True) and "max_caller_sessions" in no["message"]
    async with client.post("/v1/audio/speech", json=SPEECH, headers=bearer(KEY)) as response:
        assert response.status == 429 and response.headers["Retry-After"] == "1"
    # Tokens count for the key that made them.
    async with client.post("/v1/audio/speech", json=SPEECH, headers=bearer(OTHER)) as response:
        assert response.status == 200
        await response.read()
    await opened.pop().close()
    await until(lambda: client.app[CALLERS].open == 1)
    async with client.post("/v1/audio/speech", json=SPEECH, headers=bearer(KEY)) as response:
        assert response.status == 200
        await response.read()
    for socket in opened:
        await socket.close()


async def test_text_beyond_the_rate_is_refused_and_comes_back(start: Start) -> None:
    client = await start(caller_chars_per_minute=60)
    speaker = await Speaker.connect(client)
    await speaker.send("session.update")
    await speaker.event("session.updated")
    await speaker.send("text.append", text="x " * 15)
    await speaker.send("text.append", text="y " * 16)
    error = await speaker.event("error")
    assert (error["code"], error["retryable"]) == ("text_rate_limited", True) and "caller_chars_per_minute" in error["message"]
    async with client.post("/v1/audio/speech", json=SPEECH | {"input": "z " * 20}) as response:
        told = (await response.json())["error"]
        assert (response.status, told["type"], told["code"]) == (429, "rate_limit_error", "text_rate_limited")
        assert 1 <= int(response.headers["Retry-After"]) <= 12
    # It was not ended, so what comes before the engine has run out of it would be of the same utterance.
    assert (await speaker.event("utterance.done"))["text"] == "x " * 15
    await speaker.send("text.append", text="Well.")
    await speaker.send("text.end")
    assert (await speaker.event("utterance.done"))["text"] == "Well."
    await speaker.close()


@pytest.mark.real_time
async def test_opening_beyond_the_rate(start: Start) -> None:
    client = await start(caller_opens_per_minute=2)
    for _ in range(2):
        await (await client.ws_connect("/v1/speech")).close()
    no = await refused(client)
    assert (no["status"], no["code"]) == (429, "rate_limited") and 25 <= int(no["headers"]["Retry-After"]) <= 30
    with pytest.raises(WSServerHandshakeError):
        await client.ws_connect("/v1/speech")


@pytest.mark.real_time
async def test_a_session_with_nothing_to_say_is_closed(start: Start) -> None:
    client = await start(idle_s=1.5)
    speaker = await Speaker.connect(client)
    await speaker.send("session.update")
    begun_s = time.monotonic()
    # Longer than idle_s in the speaking, and a ping is no text.
    await speaker.say("A sentence that lasts for two seconds.")
    await speaker.send("ping")
    error = await speaker.event("error")
    assert (error["code"], error["retryable"]) == ("session_idle", True) and "open another" in error["message"]
    assert 2.2 < time.monotonic() - begun_s < 6
    message = await speaker.socket.receive()
    assert message.type is WSMsgType.CLOSE and message.data == WSCloseCode.POLICY_VIOLATION


@pytest.mark.parametrize(("audio", "text"), [("pcm_s16le", " \n"), ("webrtc", "Nobody ever comes to hear this.")])
async def test_text_that_only_waits_keeps_no_session_open(start: Start, audio: str, text: str) -> None:
    speaker = await Speaker.connect(await start(idle_s=1.0))
    await speaker.send("session.update", audio={"format": audio})
    await speaker.send("text.append", text=text)
    assert (await speaker.event("error"))["code"] == "session_idle"


def test_a_bucket_fills_again() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.take(50, 0.0) == 0 and bucket.take(20, 0.0) == pytest.approx(10.0)
    assert not bucket.full(0.0) and bucket.take(20, 10.0) == 0 and bucket.full(71.0)
    # More than a minute's worth passes once a minute's worth is there, and is paid back.
    assert bucket.take(600, 71.0) == 0 and bucket.take(1, 71.0) == pytest.approx(541.0)


def test_callers_that_have_gone_are_forgotten() -> None:
    callers = Callers(GatewayConfig(caller_opens_per_minute=60, max_caller_sessions=1))
    with callers.opened("stays", 0.0):
        for number in range(5000):
            with callers.opened(str(number), number * 0.1):
                assert callers.open == 2
        assert len(callers._callers) < 1100
        with pytest.raises(Refusal, match="max_caller_sessions"), callers.opened("stays", 500.0):
            raise AssertionError
    assert callers.open == 0
