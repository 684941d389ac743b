"""What an operator sees and does: metrics, logs, and a gateway that is stopped while it speaks."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import WSCloseCode, WSMsgType
from prometheus_client.parser import text_string_to_metric_families

from engine.logs import JsonLines
from gateway import logs
from gateway.events import Playback
from gateway.keys import DRAIN, METRICS, SESSIONS
from gateway.metrics import HeardGaps
from tests.conftest import FIXTURES
from tests.gateway.clients import PATIENCE_S, Speaker, until
from tests.gateway.conftest import Client
from tests.gateway.stand_in import StandInEngine

START_S = 60.0

Serve = Callable[..., Awaitable[tuple[asyncio.subprocess.Process, str]]]


async def metrics(client: Client) -> dict[tuple[str, str], float]:
    """Every sample by its name and its labels, as a=x,b=y."""
    async with client.get("/metrics") as response:
        assert response.status == 200 and response.content_type == "text/plain"
        families = text_string_to_metric_families(await response.text())
        return {
            (sample.name, ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.mark.real_time
async def test_metrics_count_what_happened(connect, listen, gateway, engine: StandInEngine) -> None:
    before = await metrics(gateway)
    assert (before["vivavoce_sessions", ""], before["vivavoce_engine_up", ""]) == (0, 1)
    speaker = await connect()
    await speaker.say("Hello.")
    heard = await connect("webrtc")
    listener = await listen(heard)
    await heard.say("And hello to whoever listens.")
    await heard.send("text.append", text="This one is cancelled.")
    await heard.event("utterance.started")
    await heard.send("cancel")
    await heard.event("utterance.cancelled")
    await speaker.send("session.update", voice="nobody")
    await speaker.event("error")
    async with gateway.post("/v1/audio/speech", json={"input": "Hello.", "response_format": "pcm"}) as response:
        await response.read()
    async with gateway.post("/v1/audio/speech", json={"input": ""}) as response:
        assert response.status == 400
    seen = await metrics(gateway)
    assert (seen["vivavoce_sessions", ""], seen["vivavoce_listeners", ""], seen["vivavoce_open", ""]) == (2, 1, 2)
    assert seen["vivavoce_utterances_total", "reason=end"] == 2 and seen["vivavoce_utterances_total", "reason=cancelled"] == 1
    assert seen["vivavoce_errors_total", "code=unknown_voice"] == 1 and seen["vivavoce_refusals_total", "code=nothing_to_say"] == 1
    for via, count in (("websocket", 1), ("webrtc", 2), ("http", 1)):
        assert seen["vivavoce_ttfa_seconds_count", f"via={via}"] == count, via
        assert 0 < seen["vivavoce_ttfa_seconds_sum", f"via={via}"] < count
    gateway.app[SESSIONS].by_token(heard.created["token"]).media.underruns = 3
    assert (await metrics(gateway))["vivavoce_underruns_total", "late=engine"] == 3
    await listener.close()
    await heard.close()
    await until(lambda: gateway.app[SESSIONS].count == 1)
    after = await metrics(gateway)
    assert (after["vivavoce_underruns_total", "late=engine"], after["vivavoce_sessions", ""]) == (3, 1)


async def test_gaps_that_listeners_heard(gateway) -> None:
    gaps = HeardGaps(gateway.app[METRICS])
    for concealed_ms in (0, 0, 40, 90, 90, 120, 120, 0, 30):
        gaps.saw(Playback(1, 100, 100, concealed_ms, True))
    seen = await metrics(gateway)
    # 40 and 50 are one gap, 30 the next; then another listener, whose own 30 are a third.
    assert seen["vivavoce_heard_underruns_total", ""] == 3
    assert seen["vivavoce_concealed_seconds_total", ""] == pytest.approx(0.15)


async def test_metrics_of_the_engine(gateway, engine: StandInEngine) -> None:
    for _ in range(300):
        seen = await metrics(gateway)
        if ("vivavoce_engine_slots", "") in seen:
            break
        await asyncio.sleep(0.1)
    assert (seen["vivavoce_engine_slots", ""], seen["vivavoce_engine_slots_used", ""], seen["vivavoce_engine_queue", ""]) == (16, 0, 0)
    rows = {label: value for (name, label), value in seen.items() if name == "vivavoce_engine_batch_rows_bucket"}
    assert (rows["le=1,stage=codec"], rows["le=2,stage=codec"], rows["le=4,stage=codec"], rows["le=+Inf,stage=codec"]) == (3, 3, 5, 5)
    assert seen["vivavoce_engine_batch_rows_sum", "stage=codec"] == 11 and seen["vivavoce_engine_stage_seconds_total", "stage=codec"] == 0.5
    slack = [seen["vivavoce_engine_slack_seconds_bucket", f"le={bound}"] for bound in ("0.0", "1.0", "+Inf")]
    assert slack == [1, 5, 7] and seen["vivavoce_engine_slack_seconds_sum", ""] == 3.5
    assert seen["vivavoce_engine_launch_cost_seconds", "frames=1,rows=2,stage=talker"] == 0.004


async def test_openmetrics_too(gateway) -> None:
    async with gateway.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as response:
        assert response.content_type == "application/openmetrics-text" and (await response.text()).endswith("# EOF\n")


async def test_log_lines_say_whose_they_are(connect, gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(JsonLines(logs.places))
    speakers = [await connect() for _ in range(2)]
    for speaker in speakers:
        await speaker.say("First.")
        await speaker.send("text.append", text="It breaks {fail}")
        await speaker.event("error")
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    for speaker in speakers:
        mine = [line for line in lines if line.get("session") == speaker.created["session"]]
        assert mine[0]["message"].startswith("opened by 127.0.0.1") and mine[0]["level"] == "INFO"
        done = next(line for line in mine if line["message"].startswith("done (end)"))
        assert (done["utterance"], done["logger"]) == (1, "gateway.api.native") and done["time"][:2] == "20"
        assert any(line.get("utterance") == 2 and line["message"].startswith("utterance_failed: ") for line in mine)


def test_lines_of_text_and_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    logger = logging.getLogger("gateway.test")
    try:
        logs.SESSION.set("s1")
        logs.UTTERANCE.set(4)
        logs.configure("text")
        logger.info("it is %s", "so")
        logs.configure("json")
        try:
            raise ValueError("broken\nin two")
        except ValueError:
            logger.exception("it broke", extra={"utterance": 5})
    finally:
        logs.SESSION.set(None)
        logs.UTTERANCE.set(None)
        root.handlers[:] = before
        root.setLevel(level)
    text, line = capsys.readouterr().err.splitlines()
    assert text.endswith("INFO gateway.test [session=s1 utterance=4]: it is so")
    told = json.loads(line)
    assert (told["session"], told["utterance"], told["message"], told["level"]) == ("s1", 5, "it broke", "ERROR")
    assert "ValueError: broken\nin two" in told["error"]


@pytest.fixture
async def serve(endpoint: str) -> AsyncIterator[Serve]:
    """`await serve("--set", ...)`: a gateway process and its address."""
    processes: list[asyncio.subprocess.Process] = []

    async def started(*arguments: str) -> tuple[asyncio.subprocess.Process, str]:
        command = [sys.executable, "-m", "gateway", "serve", "--engine", endpoint, "--port", "0", *arguments]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        return process, line.split()[-1]

    yield started
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def opened(http: aiohttp.ClientSession, address: str) -> aiohttp.ClientWebSocketResponse:
    socket = await http.ws_connect(address + "/v1/speech")
    await socket.receive_json()
    await socket.send_json({"type": "session.update"})
    await socket.receive_json()
    return socket


async def rest(socket: aiohttp.ClientWebSocketResponse) -> tuple[list[dict[str, object]], int, aiohttp.WSMessage]:
    """Events, bytes of audio and the message that ends a socket."""
    events, audio = [], 0
    while (message := await socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
        if message.type is WSMsgType.TEXT:
            events.append(message.json())
        else:
            audio += len(message.data)
    return events, audio, message


async def test_term_lets_what_is_spoken_be_heard_out(serve: Serve, engine: StandInEngine) -> None:
    # It waits for the rest of its text.
    engine.idle_s = PATIENCE_S
    process, address = await serve()
    text = "A sentence that is said to its very end, come what may."
    async with aiohttp.ClientSession() as http:
        silent, speaking = await opened(http, address), await opened(http, address)
        await speaking.send_json({"type": "text.append", "text": text[:20]})
        await speaking.receive_json()
        process.terminate()
        assert (await rest(silent))[2].data == WSCloseCode.GOING_AWAY
        async with http.get(address + "/v1/speech") as response:
            told = await response.json()
            assert (response.status, told["code"], told["retryable"], response.headers["Retry-After"]) == (503, "draining", True, "5")
        async with http.post(address + "/v1/audio/speech", json={"input": "Hello."}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "draining")
        async with http.get(address + "/ready") as response:
            assert response.status == 503 and "stopping" in (await response.json())["reason"]
        # Its text goes on, too.
        await speaking.send_json({"type": "text.append", "text": text[20:]})
        await speaking.send_json({"type": "text.end"})
        events, _, last = await rest(speaking)
    done = [event for event in events if event["type"] == "utterance.done"]
    assert [(event["text"], event["reason"]) for event in done] == [(text, "end")]
    assert last.data == WSCloseCode.GOING_AWAY
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


@pytest.mark.real_time
async def test_term_does_not_wait_for_text_that_nobody_is_there_to_hear(serve: Serve) -> None:
    process, address = await serve("--set", "drain_s=60")
    texts = ["Nobody has come to hear this.", "Nor this."]
    async with aiohttp.ClientSession() as http:
        unheard, heard = await opened(http, address), await opened(http, address)
        await unheard.send_json({"type": "session.update", "audio": {"format": "webrtc"}})
        await unheard.receive_json()
        for socket in (unheard, heard):
            for text in texts:
                await socket.send_json({"type": "text.append", "text": text})
                await socket.send_json({"type": "text.end"})
        await heard.receive_json()
        process.terminate()
        begun_s = time.monotonic()
        events, _, last = await rest(unheard)
        assert [(event["type"], event["code"], event["retryable"]) for event in events] == [("error", "draining", True)]
        assert last.data == WSCloseCode.GOING_AWAY
        # Who gets audio on the socket itself is there, and what waits for its turn is heard.
        events, _, last = await rest(heard)
        assert [event["text"] for event in events if event["type"] == "utterance.done"] == texts
        assert "error" not in {event["type"] for event in events}
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    assert time.monotonic() - begun_s < 10


async def test_term_waits_a_moment_for_a_socket_that_has_broken(serve: Serve) -> None:
    process, address = await serve("--set", "drain_s=60", "--set", "unheard_s=1")
    async with aiohttp.ClientSession() as http:
        socket = await opened(http, address)
        await socket.send_json({"type": "text.append", "text": "This goes on. " * 20})
        await socket.receive_json()
        process.terminate()
        begun_s = time.monotonic()
        assert socket._response.connection is not None and socket._response.connection.transport is not None
        socket._response.connection.transport.abort()
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        assert time.monotonic() - begun_s > 1


@pytest.mark.real_time
async def test_the_last_sample_is_heard_before_the_connection_is_closed(connect, gateway) -> None:
    """Texts of different lengths, so that the ends of some fall between two looks."""
    speakers = [await connect() for _ in range(8)]

    async def left_s(speaker: Speaker, text: str) -> float:
        """From when all had been heard to the close."""
        # Not when it is told that it has begun, which may be later than that.
        begun_s = time.monotonic()
        await speaker.send("text.append", text=text)
        await speaker.send("text.end")
        await speaker.event("utterance.started")
        heard_s = (await speaker.event("utterance.done"))["duration_ms"] / 1000
        while (message := await speaker.socket.receive()).type is not WSMsgType.CLOSE:
            assert message.type is WSMsgType.TEXT
        return time.monotonic() - begun_s - heard_s

    ends = [asyncio.create_task(left_s(speaker, "Said to its end" + "." * length)) for length, speaker in enumerate(speakers)]
    await asyncio.sleep(0.3)
    await gateway.app[DRAIN].run(2 * PATIENCE_S)
    assert min(await asyncio.gather(*ends)) > 0 and max(end.result() for end in ends) < 1.5


async def test_a_speech_request_is_answered_to_its_end(serve: Serve) -> None:
    process, address = await serve()
    body = {"input": "A sentence that is said to its very end, come what may.", "response_format": "pcm", "pace": "live"}
    async with aiohttp.ClientSession() as http, http.post(address + "/v1/audio/speech", json=body) as response:
        process.terminate()
        assert len(await response.read()) == 2 * 1440 * len(body["input"])
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


@pytest.mark.real_time
@pytest.mark.parametrize("how", ["limit", "second", "interrupt"])
async def test_an_end_that_does_not_wait(serve: Serve, how: str) -> None:
    process, address = await serve("--set", "drain_s=1" if how == "limit" else "drain_s=60")
    async with aiohttp.ClientSession() as http:
        socket = await opened(http, address)
        await socket.send_json({"type": "text.append", "text": "This goes on. " * 20})
        await socket.receive_json()
        begun_s = time.monotonic()
        process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGTERM)
        if how == "second":
            # Two that it has not seen yet are one.
            status = 200
            while status != 503:
                async with http.get(address + "/ready") as response:
                    status = response.status
            process.terminate()
        _, _, last = await rest(socket)
        assert last.data == WSCloseCode.GOING_AWAY
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    assert (0.9 if how == "limit" else 0) < time.monotonic() - begun_s < 4


async def test_json_logs_of_gateway_and_engine_are_json_alone() -> None:
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--log-format", "json", "--model", str(FIXTURES / "checkpoints" / "cv17")]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 60)
    process.terminate()
    _, said = await process.communicate()
    lines = [json.loads(line) for line in said.splitlines()]
    assert {"engine.service", "gateway.pool", "gateway.drain"} <= {line["logger"] for line in lines}
