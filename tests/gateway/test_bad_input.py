"""What a client may do wrong: a typed error or a clean end, and the session, or the next one, works."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import msgspec
import pytest

from gateway.config import GatewayConfig
from gateway.events import EventError, SessionUpdate
from gateway.keys import CALLERS, SESSIONS
from gateway.settings import Settings
from tests.gateway.clients import PATIENCE_S, until
from tests.gateway.conftest import Client
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
        {"type": "session.update", "instructions": "half \ud83d"},
    ],
)
async def test_wrong_fields(connect, event: dict[str, object]) -> None:
    speaker = await connect()
    await speaker.socket.send_json(event)
    error = await speaker.event("error")
    assert error["code"] == "invalid_event" and str(event["type"]) in error["message"]
    await works(speaker)


async def test_a_wrong_audio_format_lists_the_valid(connect) -> None:
    speaker = await connect()
    await speaker.send("session.update", audio={"format": "mp3"})
    assert (await speaker.event("error"))["message"] == ("session.update: Invalid enum value 'mp3' - at `audio.format`; valid: pcm_s16le, webrtc")
    await speaker.send("session.update", audio={"format": "pcm_s16le", "pace": "brisk"})
    assert (await speaker.event("error"))["message"] == ("session.update: Invalid enum value 'brisk' - at `audio.pace`; valid: live, file")
    await speaker.send("session.update", audio={"format": "webrtc", "pace": "file"})
    assert (await speaker.event("error"))["message"].startswith("audio.pace: file is for pcm_s16le")


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
    assert (await speaker.event("session.updated"))["audio"] == {"format": "pcm_s16le", "pace": "live"}
    await works(speaker)


@pytest.mark.parametrize(
    ("field", "code", "listed"), [("voice", "unknown_voice", "Vivian, Ryan"), ("language", "unknown_language", "auto, english, german")]
)
async def test_what_the_checkpoint_lacks(connect, field: str, code: str, listed: str) -> None:
    speaker = await connect()
    await speaker.send("session.update", **{field: "Nobody"})
    error = await speaker.event("error")
    assert error["code"] == code and error["message"] == f"{field}: none is called 'Nobody'; the checkpoint has: {listed}"
    await works(speaker)


def test_a_checkpoint_without_voices_says_so() -> None:
    info = msgspec.structs.replace(StandInEngine.info, voices=[])
    with pytest.raises(EventError, match="voice: this checkpoint has none to choose from; leave voice out"):
        Settings.initial(info).updated(SessionUpdate(voice="Ryan"), info, 100)


async def test_instructions_over_the_limit(connect, config: GatewayConfig) -> None:
    speaker = await connect()
    await speaker.send("session.update", instructions="slowly " * 100)
    error = await speaker.event("error")
    assert (error["code"], error["message"]) == ("text_too_long", "instructions: at most 400 characters, these have 700; shorten them")
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


@pytest.mark.real_time
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("text", ["👍", "👨\u200d👩\u200d👧 🇫🇷 ", "...", " — ?!", "\x00\u200b\ufeff", "***"])
async def test_nothing_that_can_be_said(connect, engine: StandInEngine, text: str, clean: bool) -> None:
    """Done at once, without sound and without asking the engine; and once words follow, they are one text with it."""
    speaker = await connect()
    await speaker.send("session.update", text={"clean": clean})
    begin_s = time.monotonic()
    done = await speaker.say(text)
    assert (done["reason"], done["duration_ms"], done["text"]) == ("empty", 0, text)
    assert time.monotonic() - begin_s < 1.0 and engine.utterances == []
    await speaker.send("text.append", text=text)
    await asyncio.sleep(0.4)
    assert engine.utterances == [], "nothing is held open for it"
    done = await speaker.say(" Great")
    assert (done["reason"], done["text"]) == ("end", text + " Great")
    assert engine.utterances[0].text.endswith("Great")


async def test_an_idle_rest_that_cannot_be_said_is_no_utterance(connect, engine: StandInEngine) -> None:
    engine.cut_after = len("Hello there")
    speaker = await connect()
    await speaker.send("session.update", text={"clean": False})
    done = await speaker.say("Hello there 👍 ...")
    assert done["reason"] == "idle" and len(engine.utterances) == 1
    assert (await speaker.say("Still here."))["utterance"] == 2


async def test_a_character_in_two_halves(connect, engine: StandInEngine) -> None:
    """As a JavaScript client sends a text that it cut by UTF-16 units."""
    speaker = await connect()
    await speaker.send("session.update", text={"clean": False})
    for piece in ("One \ud83d", "\ude00 two \ud842", "\udfb7\ud83d\ude00", "."):
        await speaker.send("text.append", text=piece)
    await speaker.send("text.end")
    done = await speaker.event("utterance.done")
    assert done["text"] == "One \U0001f600 two \U00020bb7\U0001f600." == engine.utterances[0].text


@pytest.mark.parametrize(
    ("pieces", "half", "spoken"),
    [
        (["One \ud83d", "two."], "\\ud83d", "One two."),
        (["One \ude00two."], "\\ude00", "One two."),
        (["One two.\ud83d"], "\\ud83d", "One two."),
        (["One \ude00\ud83dtwo."], "\\ude00", "One two."),
    ],
)
async def test_half_a_character_is_left_out_and_told(connect, engine: StandInEngine, pieces: list[str], half: str, spoken: str) -> None:
    speaker = await connect()
    for piece in pieces:
        await speaker.send("text.append", text=piece)
    await speaker.send("text.end")
    error = await speaker.event("error")
    assert (error["code"], error["retryable"]) == ("invalid_text", False)
    assert error["message"] == (
        f"text: '{half}' is half of a surrogate pair whose other half was not beside it; it was left out, the rest is spoken; "
        "cut text between characters"
    )
    assert (await speaker.event("utterance.done"))["text"] == spoken
    speaker.pcm.clear()
    await works(speaker)


async def test_a_hundred_thousand_characters_at_once(connect, config: GatewayConfig) -> None:
    """With the default size of an event: an error that says what to do, not a closed socket."""
    speaker = await connect()
    await speaker.send("text.append", text="words and " * 10_000)
    error = await speaker.event("error")
    assert error["code"] == "text_too_long"
    assert error["message"] == "text: one text.append may carry 400 characters, this has 100000; send it in pieces"
    await works(speaker)


async def test_a_text_too_long_for_one_utterance_goes_on_in_the_next(connect, engine: StandInEngine) -> None:
    """Also what was sent after the engine had planned the end."""
    engine.cut_after, engine.cut_reason, engine.idle_s = len("The first sentence."), "length", PATIENCE_S
    speaker = await connect()
    await speaker.send("text.append", text="The first sentence. And the ")
    await asyncio.sleep(0.05)
    await speaker.send("text.append", text="second one.")
    await speaker.send("text.end")
    first, second = await speaker.event("utterance.done"), await speaker.event("utterance.done")
    assert (first["reason"], first["text"]) == ("length", "The first sentence.")
    assert (second["reason"], second["text"]) == ("end", " And the second one.")


async def test_after_a_voice_that_went_wrong_the_text_it_had_not_taken_is_spoken(connect, engine: StandInEngine) -> None:
    engine.cut_after, engine.cut_reason = len("The first sentence."), "repetition"
    speaker = await connect()
    await speaker.send("text.append", text="The first sentence. And the second one.")
    await speaker.send("text.end")
    error = await speaker.event("error")
    assert (error["code"], error["retryable"], error["utterance"]) == ("speech_broken_off", True, 1) and "repetition" in error["message"]
    first, second = await speaker.event("utterance.done"), await speaker.event("utterance.done")
    assert (first["reason"], first["text"]) == ("repetition", "The first sentence.")
    assert (second["reason"], second["text"]) == ("end", " And the second one.")


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


async def test_a_text_frame_that_is_not_utf8_closes(connect) -> None:
    """A frame carries whole characters; half of one is a breach of WebSocket itself."""
    speaker = await connect()
    await speaker.socket._writer.send_frame('{"type": "text.append", "text": "é"}'.encode()[:-3], aiohttp.WSMsgType.TEXT)
    message = await speaker.socket.receive()
    assert message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.INVALID_TEXT
    await works(await connect())


async def test_oversize_frame_closes(connect, config: GatewayConfig) -> None:
    speaker = await connect()
    await speaker.socket.send_str("x" * (config.max_event_bytes + 1))
    message = await speaker.socket.receive()
    assert message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
    await works(await connect())


async def test_socket_closed_in_mid_speech(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    await speaker.send("text.append", text="A sentence that takes its time to be said, for it has many words. " * 3)
    await speaker.event("utterance.started")
    await speaker.close()
    await until(lambda: engine.utterances[0].cancelled)
    await works(await connect())


async def test_who_sends_and_reads_nothing_is_let_go(connect, gateway: Client) -> None:
    """It is never silent, so no heartbeat finds it; and it would be told to go behind thousands of answers that it does not read."""
    request = b"GET /v1/speech HTTP/1.1\r\nHost: gateway\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port, limit=1024)
    writer.write(request + key)
    await reader.readuntil(b"\r\n\r\n")
    sessions = gateway.app[SESSIONS]
    assert sessions.count == 1
    event = b'{"type": "%s"}' % (b"x" * 60)
    # In a masked frame, with a mask that changes nothing.
    frame = bytes([0x81, 0x80 | len(event)]) + bytes(4) + event
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(60):
            while True:
                writer.write(frame * 100)
                await writer.drain()
    await until(lambda: not sessions.count)
    await works(await connect())


async def test_too_many_sessions(connect, gateway: Client, config: GatewayConfig) -> None:
    speakers = [await connect() for _ in range(config.max_sessions)]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await connect()
    assert refused.value.status == 503
    await speakers.pop().close()
    await until(lambda: gateway.app[CALLERS].open < config.max_sessions)
    await works(await connect())
