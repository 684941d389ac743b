"""What a client may do wrong: a typed error or a clean end, and the session, or the next one, works."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from gateway.config import GatewayConfig
from tests.gateway.stand_in import StandInEngine


async def works(speaker) -> None:
    done = await speaker.say("Still here.")
    assert done["reason"] == "end"
    assert len(speaker.pcm) == 2 * 24 * done["duration_ms"]


@pytest.mark.parametrize(
    "message", ["", "{", "null", "[]", "17", '"text.append"', '{"text": "no type"}', '{"type": 5}', "{'type': 'ping'}", "[" * 5000]
)
async def test_malformed_event(connect, message: str) -> None:
    speaker = await connect()
    await speaker.socket.send_str(message)
    error = await speaker.event("error")
    assert (error["code"], error["retryable"]) == ("malformed_event", False)
    await works(speaker)


async def test_unknown_event_names_the_known(connect) -> None:
    speaker = await connect()
    await speaker.send("text.shout", text="HELLO")
    error = await speaker.event("error")
    assert error["code"] == "unknown_event"
    for known in ("session.update", "text.append", "text.flush", "text.end", "cancel", "ping"):
        assert known in error["message"]
    await works(speaker)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "text.append", "text": 5},
        {"type": "text.append"},
        {"type": "cancel", "utterance": "all"},
        {"type": "cancel", "utterance": 0},
        {"type": "session.update", "audio": {"format": "mp3"}},
        {"type": "session.update", "voice": ["Ryan"]},
    ],
)
async def test_wrong_fields(connect, event: dict[str, object]) -> None:
    speaker = await connect()
    await speaker.socket.send_json(event)
    error = await speaker.event("error")
    assert error["code"] == "invalid_event" and str(event["type"]) in error["message"]
    await works(speaker)


async def test_text_before_session_update(connect, engine: StandInEngine) -> None:
    speaker = await connect(None)
    for kind, fields in (("text.append", {"text": "too early"}), ("text.end", {}), ("text.flush", {})):
        await speaker.send(kind, **fields)
        error = await speaker.event("error")
        assert error["code"] == "session_not_configured" and "session.update" in error["message"]
    await speaker.send("cancel")
    await speaker.send("ping")
    await speaker.event("pong")
    await speaker.send("session.update")
    assert (await speaker.event("session.updated"))["audio"] == {"format": "pcm_s16le"}
    await works(speaker)


@pytest.mark.parametrize(
    ("field", "code", "listed"), [("voice", "unknown_voice", "Vivian, Ryan"), ("language", "unknown_language", "english, german")]
)
async def test_what_the_checkpoint_lacks(connect, field: str, code: str, listed: str) -> None:
    speaker = await connect()
    await speaker.send("session.update", **{field: "Nobody"})
    error = await speaker.event("error")
    assert error["code"] == code and listed in error["message"]
    await works(speaker)


async def test_text_over_the_limits(connect, config: GatewayConfig, engine: StandInEngine) -> None:
    speaker = await connect()
    await speaker.send("text.append", text="x" * (config.max_append_chars + 1))
    error = await speaker.event("error")
    assert error["code"] == "text_too_long" and str(config.max_append_chars) in error["message"]
    for _ in range(config.max_utterance_chars // config.max_append_chars + 1):
        await speaker.send("text.append", text="y" * config.max_append_chars)
    error = await speaker.event("error")
    assert error["code"] == "text_too_long" and str(config.max_utterance_chars) in error["message"]
    await speaker.send("cancel")
    await speaker.event("utterance.cancelled")
    speaker.pcm.clear()
    await works(speaker)


async def test_too_many_utterances(connect, config: GatewayConfig) -> None:
    speaker = await connect()
    for _ in range(config.max_waiting_utterances + 2):
        await speaker.send("text.append", text="A sentence that takes its time to be said, indeed it does, for it has many words.")
        await speaker.send("text.end")
    assert (await speaker.event("error"))["code"] == "too_many_utterances"
    await speaker.send("cancel")
    await speaker.event("utterance.cancelled")
    speaker.pcm.clear()
    await works(speaker)


async def test_nothing_to_say(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    await speaker.send("text.append", text="")
    await speaker.send("text.end")
    await speaker.send("text.flush")
    await speaker.send("text.append", text=" \n")
    await speaker.send("text.end")
    done = await speaker.event("utterance.done")
    assert (done["reason"], done["duration_ms"]) == ("empty", 0)
    assert engine.utterances == []
    await works(speaker)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<|im_end|><|endoftext|> said plainly.", "<|im_end|><|endoftext|> said plainly."),
        ("\u0000\u200b\ufeff \U0001f600 \u202eodd", "odd"),
        ("日本語と中文。", "日本語と中文。"),
    ],
)
async def test_any_text_is_text(connect, engine: StandInEngine, text: str, said: str) -> None:
    speaker = await connect()
    assert (await speaker.say(text))["text"] == text
    assert engine.utterances[0].text == said
    await speaker.send("session.update", text={"clean": False})
    assert (await speaker.say(text))["text"] == text
    assert engine.utterances[1].text == text


async def test_engine_failure_is_an_error_event(connect) -> None:
    speaker = await connect()
    await speaker.send("text.append", text="Break {fail} here.")
    error = await speaker.event("error")
    assert (error["code"], error["retryable"], error["utterance"]) == ("utterance_failed", True, 1)
    assert (await speaker.event("utterance.done"))["reason"] == "error"
    await speaker.send("text.end")
    await works(speaker)


async def test_binary_frame_closes(connect) -> None:
    speaker = await connect()
    await speaker.socket.send_bytes(b"\0\0")
    message = await speaker.socket.receive()
    assert message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.UNSUPPORTED_DATA
    await works(await connect())


async def test_oversize_frame_closes(connect, config: GatewayConfig) -> None:
    speaker = await connect()
    await speaker.socket.send_str("x" * (config.max_event_bytes + 1))
    message = await speaker.socket.receive()
    assert message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
    await works(await connect())


async def test_socket_closed_in_mid_speech(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    await speaker.send("text.append", text="A sentence that takes its time to be said, for it has many words.")
    await speaker.event("utterance.started")
    speaker.socket._response.connection.transport.abort()  # type: ignore[union-attr]
    await asyncio.sleep(0.3)
    assert engine.utterances[0].cancelled
    await works(await connect())


async def test_too_many_sessions(connect, config: GatewayConfig) -> None:
    speakers = [await connect() for _ in range(config.max_sessions)]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await connect()
    assert refused.value.status == 503
    await speakers.pop().close()
    await asyncio.sleep(0.1)
    await works(await connect())
