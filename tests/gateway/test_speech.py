"""`POST /v1/audio/speech`: OpenAI's own client against the gateway, and what no client of OpenAI's would send."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import time
import wave
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import av
import msgspec
import openai
import pytest
from aiohttp.test_utils import TestClient

from engine import EngineUnavailable, Overloaded, RequestRefused
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.pool import EnginePool
from tests.gateway.clients import until
from tests.gateway.conftest import Server
from tests.gateway.stand_in import RATE, SAMPLES_PER_CHAR, StandInEngine

TEXT = "Hello there, listener."
LONG = "A sentence that takes its time to be said, for it has many words. " * 12
SPEECH = "/v1/audio/speech"


@pytest.fixture
async def sdk(gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=str(gateway.make_url("/v1")), api_key="none", max_retries=0) as client:
        yield client


def made(engine: StandInEngine, number: int = -1) -> bytes:
    return bytes(engine.utterances[number].pcm)


async def refused(gateway, status: int, **body: object) -> dict[str, Any]:
    """The error of a request that must be refused with this status."""
    async with gateway.post(SPEECH, json={"model": "tts-1", "voice": "ryan", "input": TEXT} | body) as response:
        assert response.status == status, await response.text()
        assert response.content_type == "application/json" and response.headers["x-request-id"].startswith("req_")
        answer = await response.json()
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = answer["error"]
        if status in (429, 503):
            assert int(response.headers["Retry-After"]) >= 1
        return error


async def freed(engine: StandInEngine) -> float:
    """Seconds until the engine was told to stop."""
    begun_s = time.monotonic()
    await until(lambda: engine.utterances[-1].cancelled)
    return time.monotonic() - begun_s


def speaking() -> list[str]:
    """The gateway's tasks that are at work for a request."""
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("speech-")]


# OpenAI's client


async def test_pcm_is_what_the_engine_made(sdk: openai.AsyncOpenAI, engine: StandInEngine) -> None:
    answer = await sdk.audio.speech.create(model="tts-1", voice="ryan", input=TEXT, response_format="pcm")
    assert answer.content == made(engine) and len(answer.content) == 2 * len(TEXT) * SAMPLES_PER_CHAR
    request = engine.utterances[0].request
    assert (request.voice, request.language, request.pace, request.live) == ("Ryan", "auto", "file", False)
    assert engine.utterances[0].text == TEXT


@pytest.mark.parametrize("kind", ["wav", "opus", "mp3", "flac", "aac"])
async def test_formats(sdk: openai.AsyncOpenAI, engine: StandInEngine, kind: Any) -> None:
    async with sdk.audio.speech.with_streaming_response.create(model="tts-1", voice="alloy", input=TEXT, response_format=kind) as answer:
        content_type = answer.headers["content-type"]
        data = await answer.read()
    assert content_type == f"audio/{ {'opus': 'ogg', 'mp3': 'mpeg'}.get(kind, kind) }"
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.audio[0]
        heard_s = sum(frame.samples for frame in file.decode(stream)) / stream.rate
    assert heard_s == pytest.approx(len(TEXT) * SAMPLES_PER_CHAR / RATE, abs=1e-9 if kind in ("wav", "opus", "flac") else 0.1)


async def test_mp3_is_what_openai_gives_without_being_told(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.audio.speech.create(model="gpt-4o-mini-tts", voice="nova", input=TEXT)
    assert answer.response.headers["content-type"] == "audio/mpeg" and answer.content[:1] == b"\xff"


async def test_speech_comes_while_it_is_made(sdk: openai.AsyncOpenAI, engine: StandInEngine) -> None:
    engine.frame_s = 0.05
    async with sdk.audio.speech.with_streaming_response.create(model="tts-1", voice="ryan", input=TEXT, response_format="pcm") as answer:
        assert "transfer-encoding" in answer.headers and "content-length" not in answer.headers
        async for _ in answer.iter_bytes():
            assert engine.utterances[0].made < len(TEXT) * SAMPLES_PER_CHAR / 2, "the first bytes came late"
            break


async def test_fields_reach_the_engine(sdk: openai.AsyncOpenAI, engine: StandInEngine) -> None:
    await sdk.audio.speech.create(
        model="Stand-In",
        voice={"id": "vivian"},
        input="A **bold** word.",
        instructions="Slowly.",
        response_format="pcm",
        extra_body={"language": "German", "seed": 7, "pace": "live", "temperature": 0.5, "max_new_tokens": 99, "unknown": [1]},
    )
    request = engine.utterances[0].request
    assert (request.voice, request.language, request.instructions, request.pace) == ("Vivian", "german", "Slowly.", "live")
    assert (request.sampling.seed, request.sampling.temperature, request.max_frames) == (7, 0.5, 99)
    assert engine.utterances[0].text == "A bold word."
    await sdk.audio.speech.create(model="tts-1", voice="ryan", input="**raw**", response_format="pcm", extra_body={"text": {"clean": False}})
    assert engine.utterances[1].text == "**raw**"


async def test_openai_voices_stand_for_ours(engine: StandInEngine, config: GatewayConfig) -> None:
    config = msgspec.structs.replace(config, openai_voices={"alloy": "ryan"})
    async with EnginePool(config) as engines, TestClient(Server(create_app(config, engines))) as client:
        await engines.first_start()
        voices = []
        for name in ("alloy", "ash", "ballad", "Nova"):
            async with client.post(SPEECH, json={"voice": name, "input": TEXT, "response_format": "pcm"}) as response:
                assert response.status == 200
                await response.read()
            voices.append(engine.utterances[-1].request.voice)
    assert voices == ["Ryan", "Ryan", "Vivian", "Vivian"]


async def test_models_and_voices(sdk: openai.AsyncOpenAI, gateway) -> None:
    names = [model.id async for model in sdk.models.list()]
    assert names == ["stand-in", "gpt-4o-mini-tts", "tts-1", "tts-1-hd"]
    assert (await sdk.models.retrieve("stand-in")).owned_by == "vivavoce"
    with pytest.raises(openai.NotFoundError, match="GET /v1/models"):
        await sdk.models.retrieve("whisper-1")
    async with gateway.get("/v1/audio/voices") as response:
        voices = await response.json()
    assert voices["voices"] == ["Vivian", "Ryan"] and "alloy" in voices["aliases"]


async def test_openai_raises_its_own_errors(sdk: openai.AsyncOpenAI, engine: StandInEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.audio.speech.create(model="tts-1", voice="nobody", input=TEXT)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("voice", "voice_not_found", "invalid_request_error")
    assert "Vivian, Ryan" in bad.value.message
    with pytest.raises(openai.NotFoundError):
        await sdk.audio.speech.create(model="whisper-1", voice="ryan", input=TEXT)
    engine.refusal = Overloaded("no room", retry_after_s=2.3)
    with pytest.raises(openai.RateLimitError) as busy:
        await sdk.audio.speech.create(model="tts-1", voice="ryan", input=TEXT)
    assert busy.value.response.headers["Retry-After"] == "3" and busy.value.code == "overloaded"


async def test_what_is_not_served_is_an_error_of_openais_shape(sdk: openai.AsyncOpenAI, gateway) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.audio.transcriptions.create(model="whisper-1", file=b"RIFF")
    assert unknown.value.code == "unknown_url" and "POST /v1/audio/speech" in unknown.value.message
    async with gateway.get(SPEECH) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["type"]) == (405, "method_not_supported", "invalid_request_error") and "POST" in error["message"]
    async with gateway.get("/v1/whep/nobody", headers={"Accept": "*/*"}) as response:
        assert response.status == 200, "the paths that are none of OpenAI's are as they were"


async def test_events(sdk: openai.AsyncOpenAI, engine: StandInEngine) -> None:
    async with sdk.audio.speech.with_streaming_response.create(
        model="tts-1", voice="ryan", input=TEXT, response_format="pcm", stream_format="sse"
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == made(engine)
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"} and len(events) > 5
    frames = -(-len(TEXT) * SAMPLES_PER_CHAR // 1920)
    assert events[-1] == {"type": "speech.audio.done", "usage": {"input_tokens": 22, "output_tokens": frames, "total_tokens": 22 + frames}}


# The contract of nari's benchmark


async def test_what_the_nari_benchmark_sends(gateway, engine: StandInEngine) -> None:
    body = {
        "model": "Qwen/stand-in", "input": TEXT, "voice": "ryan", "language": "english", "stream": True, "non_streaming_mode": False,
        "response_format": "pcm",
    }  # fmt: skip
    async with gateway.post(SPEECH, json=body | {"stream_format": "audio"}) as response:
        assert response.status == 200 and response.headers["Content-Type"] == "audio/pcm" and response.headers["x-sample-rate"] == "24000"
        assert await response.read() == made(engine)
    request = engine.utterances[0].request
    assert (request.language, request.pace, request.whole_text) == ("english", "live", False), "its listeners hear it as it comes"
    async with gateway.post(SPEECH, json=body | {"stream": False, "response_format": "wav", "non_streaming_mode": True}) as response:
        data = await response.read()
        assert response.headers["Content-Length"] == str(len(data)) == str(44 + 2 * len(TEXT) * SAMPLES_PER_CHAR)
    with wave.open(io.BytesIO(data)) as file:
        assert file.readframes(file.getnframes()) == made(engine)
    assert engine.utterances[1].request.whole_text
    async with gateway.get("/health") as response:
        assert response.status == 200


# What is wrong with a request


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 5000, b'{"input": "\\ud83d"}'])
async def test_bad_bodies(gateway, body: bytes) -> None:
    async with gateway.post(SPEECH, data=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["code"] in ("invalid_json", "invalid_value") and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({"input": 5}, 400, "input", "str"),
        ({"input": None}, 400, "input", "str"),
        ({"input": ""}, 400, "input", "empty"),
        ({"input": " \n"}, 400, "input", "empty"),
        ({"input": "😀\n```\ncode\n```"}, 400, "input", "nothing to say"),
        ({"input": "x" * 1001}, 413, "input", "1000"),
        ({"voice": "nobody"}, 400, "voice", "Vivian, Ryan"),
        ({"voice": 3}, 400, "voice", "a name"),
        ({"voice": {"name": "x"}}, 400, "id", "id"),
        ({"model": "gpt-5"}, 404, "model", "tts-1"),
        ({"model": 1}, 400, "model", "str"),
        ({"language": "klingon"}, 400, "language", "english, german"),
        ({"response_format": "midi"}, 400, "response_format", "pcm, wav, opus, mp3, flac, aac"),
        ({"stream_format": "ws"}, 400, "stream_format", "audio or sse"),
        ({"speed": 1.5}, 400, "speed", "1.0"),
        ({"speed": "fast"}, 400, "speed", "float"),
        ({"pace": "quick"}, 400, "pace", "live or file"),
        ({"seed": -1}, 400, "seed", ">= 0"),
        ({"text": {"clean": "no"}}, 400, "text", "bool"),
        ({"instructions": "x" * 401}, 413, "instructions", "400"),
        ({"instructions": "loud", "instruct": "soft"}, 400, "instruct", "one of them"),
    ],
)
async def test_wrong_fields(gateway, engine: StandInEngine, body: dict[str, object], status: int, param: str, says: str) -> None:
    error = await refused(gateway, status, **body)
    assert error["param"] == param and param in error["message"] and says in error["message"], error
    assert engine.utterances == []


async def test_input_is_needed(gateway) -> None:
    async with gateway.post(SPEECH, json={"model": "tts-1", "voice": "ryan"}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "input"


async def test_body_too_large(gateway) -> None:
    error = await refused(gateway, 413, padding="x" * (1 << 19))
    assert error["code"] == "request_too_large"


async def test_what_the_engine_refuses(gateway, engine: StandInEngine) -> None:
    engine.refusal = RequestRefused("temperature: 9 is out of range, expected 0.01 to 2")
    error = await refused(gateway, 400, temperature=9)
    assert (error["param"], error["code"]) == ("temperature", "invalid_request")
    engine.refusal = EngineUnavailable("the engine restarts")
    assert (await refused(gateway, 503))["type"] == "server_error"
    engine.refusal = None
    assert (await refused(gateway, 500, input="Break {fail} here."))["code"] == "utterance_failed"


async def test_no_engine_yet(endpoint: str) -> None:
    config = GatewayConfig(engine=endpoint + "-nowhere")
    async with EnginePool(config) as engines, TestClient(Server(create_app(config, engines))) as client:
        assert (await refused(client, 503))["code"] == "engine_unavailable"
        async with client.get("/v1/models") as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"


async def test_too_many_requests(engine: StandInEngine, config: GatewayConfig) -> None:
    config = msgspec.structs.replace(config, max_requests=2)
    engine.frame_s = 0.05
    async with EnginePool(config) as engines, TestClient(Server(create_app(config, engines))) as client:
        await engines.first_start()
        body = {"voice": "ryan", "input": LONG, "response_format": "pcm"}
        open_ = [await client.post(SPEECH, json=body) for _ in range(2)]
        assert (await refused(client, 429))["code"] == "too_many_requests"
        open_[0].close()
        await until(lambda: len(speaking()) == 1)
        async with client.post(SPEECH, json=body) as response:
            assert response.status == 200
        open_[1].close()


# What goes wrong on the way


async def test_text_longer_than_an_utterance_goes_on_in_the_next(sdk: openai.AsyncOpenAI, engine: StandInEngine) -> None:
    engine.cut_after, engine.cut_reason = 6, "length"
    answer = await sdk.audio.speech.create(model="tts-1", voice="ryan", input=TEXT, response_format="pcm")
    assert [utterance.text for utterance in engine.utterances] == [TEXT, TEXT[6:]]
    assert answer.content == made(engine, 0) + made(engine, 1)


@pytest.mark.parametrize("reason", ["runaway", "silence", "repetition"])
async def test_a_voice_that_went_wrong_is_no_whole_answer(gateway, engine: StandInEngine, reason: str) -> None:
    engine.cut_after, engine.cut_reason = 6, reason
    async with gateway.post(SPEECH, json={"voice": "ryan", "input": TEXT, "response_format": "pcm"}) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    engine.cut_after = 6
    async with gateway.post(SPEECH, json={"voice": "ryan", "input": TEXT, "response_format": "wav", "stream": False}) as response:
        error = (await response.json())["error"]
    assert response.status >= 500 and reason in error["message"] and "try again" in error["message"]


async def test_speech_that_breaks_off_is_no_whole_answer(gateway, engine: StandInEngine) -> None:
    body = {"voice": "ryan", "input": TEXT, "response_format": "pcm"}
    engine.fail_after = 8
    async with gateway.post(SPEECH, json=body) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    engine.fail_after = 8
    async with gateway.post(SPEECH, json=body | {"stream_format": "sse"}) as response:
        lines = (await response.text()).split("\n\n")
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["type"] == "speech.audio.error" and last["error"]["code"] == "utterance_failed"
    engine.fail_after = 8
    assert (await refused(gateway, 500, stream=False))["code"] == "utterance_failed"


@pytest.mark.real_time
@pytest.mark.parametrize("fields", [{}, {"response_format": "opus"}, {"stream_format": "sse"}, {"stream": False}, {"stream": True}])
async def test_a_client_that_goes_frees_the_engine(gateway, engine: StandInEngine, fields: dict[str, object], caplog) -> None:
    engine.frame_s = 0.02
    asked = asyncio.create_task(gateway.post(SPEECH, json={"voice": "ryan", "input": LONG, "response_format": "pcm"} | fields))
    await until(lambda: engine.utterances and engine.utterances[0].made >= RATE // 4)
    if asked.done():
        asked.result().connection.transport.abort()
    else:
        asked.cancel()
    assert await freed(engine) < 0.3
    await until(lambda: not speaking())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text


@pytest.mark.real_time
async def test_a_client_that_goes_before_the_first_sound_frees_the_engine(gateway, engine: StandInEngine) -> None:
    engine.frame_s = 30.0
    asked = asyncio.create_task(gateway.post(SPEECH, json={"voice": "ryan", "input": TEXT}))
    await until(lambda: engine.utterances)
    asked.cancel()
    assert await freed(engine) < 0.3
    await until(lambda: not speaking())


@pytest.mark.real_time
async def test_a_gateway_that_stops_lets_go_of_the_engine(engine: StandInEngine, config: GatewayConfig, caplog) -> None:
    engine.frame_s = 0.02
    async with EnginePool(config) as engines:
        server = Server(create_app(config, engines))
        await server.start_server(shutdown_timeout=0.3)
        async with aiohttp.ClientSession() as http:
            await engines.first_start()
            async with http.post(server.make_url(SPEECH), json={"voice": "ryan", "input": LONG, "response_format": "pcm"}) as response:
                await response.content.readany()
                await server.close()
                assert await freed(engine) < 0.5 and not speaking()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text


@pytest.mark.real_time
async def test_live_speech_is_made_a_little_ahead(gateway, engine: StandInEngine) -> None:
    async with gateway.post(SPEECH, json={"voice": "ryan", "input": LONG, "response_format": "pcm", "pace": "live"}) as response:
        await asyncio.sleep(1.0)
        assert 3.0 < engine.utterances[0].made / RATE < 5.0
        response.close()
    async with gateway.post(SPEECH, json={"voice": "ryan", "input": LONG, "response_format": "pcm", "pace": "file"}) as response:
        await response.read()
        assert engine.utterances[1].made == len(LONG) * SAMPLES_PER_CHAR


async def test_requests_do_not_mix(sdk: openai.AsyncOpenAI, engine: StandInEngine) -> None:
    texts = [f"Number {word}." for word in ("one", "twenty", "three hundred", "four thousand")]
    answers = await asyncio.gather(*(sdk.audio.speech.create(model="tts-1", voice="ryan", input=text, response_format="pcm") for text in texts))
    by_text = {utterance.text: bytes(utterance.pcm) for utterance in engine.utterances}
    assert [answer.content for answer in answers] == [by_text[text] for text in texts]
