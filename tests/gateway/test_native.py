"""The native protocol over real sockets, audio as PCM."""

from __future__ import annotations

import asyncio
import sys
import time

import aiohttp
import pytest

from tests.gateway.clients import PATIENCE_S, until
from tests.gateway.stand_in import RATE, StandInEngine


@pytest.mark.real_time
async def test_text_becomes_pcm(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    done = await speaker.say("Hello there, listener.")
    assert (done["utterance"], done["reason"], done["text"]) == (1, "end", "Hello there, listener.")
    assert bytes(speaker.pcm) == bytes(engine.utterances[0].pcm)
    assert done["duration_ms"] == round(len(speaker.pcm) / 48)
    kinds = [event["type"] for event in speaker.events]
    assert kinds[:3] == ["session.created", "session.updated", "utterance.started"]
    assert 0 < speaker.events[2]["ttfa_ms"] < 500


@pytest.mark.real_time
async def test_letters_one_at_a_time_are_one_utterance(connect, engine: StandInEngine) -> None:
    engine.idle_s = PATIENCE_S
    speaker = await connect()
    for letter in "One letter at a time.":
        await speaker.send("text.append", text=letter)
        await asyncio.sleep(0.02)
    await speaker.send("text.end")
    done = await speaker.event("utterance.done")
    assert done["text"] == "One letter at a time." == engine.utterances[0].text
    assert engine.utterances[0].request.live
    assert bytes(speaker.pcm) == bytes(engine.utterances[0].pcm)
    await speaker.say("And again.")
    rate = engine.utterances[1].request.text_rate
    assert rate is not None and 25 < rate < 90


async def test_text_after_the_end_waits_its_turn(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    for text in ("First. ", "Second. ", "Third."):
        await speaker.send("text.append", text=text)
        await speaker.send("text.end")
    dones = [await speaker.event("utterance.done") for _ in range(3)]
    assert [(done["utterance"], done["text"]) for done in dones] == [(1, "First. "), (2, "Second. "), (3, "Third.")]
    assert bytes(speaker.pcm) == b"".join(bytes(made.pcm) for made in engine.utterances)
    order = [(event["type"], event["utterance"]) for event in speaker.events if event["type"] in ("utterance.started", "utterance.done")]
    assert order == [(f"utterance.{what}", number) for number in (1, 2, 3) for what in ("started", "done")]


async def test_text_the_engine_ran_out_of_begins_the_next_utterance(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    await speaker.send("text.append", text="Hold on")
    first = await speaker.event("utterance.done")
    await speaker.send("text.append", text=" to this.")
    await speaker.send("text.end")
    second = await speaker.event("utterance.done")
    assert (first["reason"], first["text"]) == ("idle", "Hold on")
    assert (second["reason"], second["text"]) == ("end", " to this.")


async def test_settings_reach_the_engine(connect, engine: StandInEngine) -> None:
    speaker = await connect(None)
    await speaker.send("session.update", voice="ryan", language="German", instructions="Slowly.", audio={"format": "pcm_s16le"}, colour="blue")
    updated = await speaker.event("session.updated")
    assert (updated["voice"], updated["language"], updated["voices"]) == ("Ryan", "german", ["Vivian", "Ryan"])
    assert updated["languages"] == ["auto", "english", "german"]
    await speaker.send("session.update", language="auto")
    assert (await speaker.event("session.updated"))["voice"] == "Ryan"
    await speaker.say("Hello.")
    request = engine.utterances[0].request
    assert (request.voice, request.language, request.instructions) == ("Ryan", "auto", "Slowly.")


async def test_settings_hold_from_the_next_text_on(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    for text, voice in (("First, and rather long, so that the others wait.", "ryan"), ("Second.", "vivian"), ("Third.", "ryan")):
        await speaker.send("text.append", text=text)
        await speaker.send("session.update", voice=voice)
        await speaker.send("text.append", text=" More.")
        await speaker.send("text.end")
    for _ in range(3):
        await speaker.event("utterance.done")
    assert [utterance.request.voice for utterance in engine.utterances] == ["Vivian", "Ryan", "Vivian"]


async def test_cancel_after_all_was_sent_says_what_was_heard(connect) -> None:
    speaker = await connect()
    text = "A sentence of two seconds, sent at once."
    begun_s = time.monotonic()
    await speaker.say(text)
    sent_s = time.monotonic()
    await asyncio.sleep(0.5)
    least_ms = (time.monotonic() - sent_s) * 1000
    await speaker.send("cancel")
    cancelled = await speaker.event("utterance.cancelled")
    assert cancelled["utterance"] == 1 and least_ms - 1 <= cancelled["heard_ms"] <= (time.monotonic() - begun_s) * 1000
    assert 0 < len(cancelled["heard_text"]) < len(text)
    await speaker.say("Short.")
    await asyncio.sleep(0.6)
    await speaker.send("cancel")
    await speaker.send("ping")
    await speaker.event("pong")
    assert speaker.events[-2]["type"] != "utterance.cancelled"


@pytest.mark.real_time
async def test_cancel_says_what_was_heard(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    text = "This is a rather long sentence that nobody will hear to its end, because it is cut. " * 2
    await speaker.send("text.append", text=text)
    await speaker.send("text.end")
    await speaker.send("text.append", text="Never heard.")
    await speaker.event("utterance.started")
    await until(lambda: engine.utterances[0].playbacks and engine.utterances[0].playbacks[-1].heard > 0.9 * RATE)
    await speaker.send("cancel")
    cancelled = await speaker.event("utterance.cancelled")
    assert cancelled["utterance"] == 1
    assert 900 < cancelled["heard_ms"] < 1300
    assert text.startswith(cancelled["heard_text"]) and 5 <= len(cancelled["heard_text"]) <= 30
    heard = len(speaker.pcm)
    await speaker.send("ping")
    await speaker.event("pong")
    assert len(speaker.pcm) == heard, "audio after utterance.cancelled"
    await until(lambda: engine.utterances[0].cancelled)
    assert len(engine.utterances) == 1
    done = await speaker.say("The next one works.")
    assert (done["utterance"], done["reason"]) == (2, "end")


@pytest.mark.real_time
async def test_progress_and_playback_follow_the_clock(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    await speaker.send("text.append", text="x " * 60)
    await speaker.send("text.end")
    await speaker.event("utterance.done")
    spoken = [event["spoken_ms"] for event in speaker.events if event["type"] == "utterance.progress"]
    assert len(spoken) >= 15 and spoken == sorted(set(spoken))
    ends = [event["text_until"] for event in speaker.events if event["type"] == "utterance.progress"]
    assert ends == sorted(ends) and 0 < ends[-1] <= 120
    playbacks = engine.utterances[0].playbacks
    await until(lambda: playbacks[-1].heard > 3 * RATE)
    assert any(told.playing for told in playbacks) and not any(told.measured for told in playbacks)


async def test_sessions_do_not_mix(connect, engine: StandInEngine) -> None:
    speakers = [await connect() for _ in range(5)]
    texts = [f"{word} and a little more of it." for word in ("One", "Second", "The third", "And fourth", "Fifthly")]
    await asyncio.gather(*(speaker.say(text) for speaker, text in zip(speakers, texts, strict=True)))
    made = {utterance.text: bytes(utterance.pcm) for utterance in engine.utterances}
    assert [bytes(speaker.pcm) for speaker in speakers] == [made[text] for text in texts]


async def test_serve_stops_in_good_order(endpoint: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "serve", "--engine", endpoint, "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    assert line.startswith("vivavoce is listening on http://127.0.0.1:")
    async with aiohttp.ClientSession() as http, http.ws_connect(line.split()[-1] + "/v1/speech") as socket:
        await socket.receive_json()
        await socket.send_json({"type": "session.update"})
        await socket.receive_json()
        await socket.send_json({"type": "text.append", "text": "A sentence that is not said to its end."})
        process.terminate()
        while (message := await socket.receive()).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            pass
        assert message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.GOING_AWAY
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def test_serve_says_why_it_cannot() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", "serve", "--port", "70000", stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 1 and said.startswith(b"vivavoce: the command line:") and said.count(b"\n") == 1
