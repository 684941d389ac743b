"""The engine process and its client over a real socket."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq

from engine import AudioChunk, Done, EngineClient, EngineError, EngineUnavailable, EngineUtterance, RequestRefused, Sampling, SpeechRequest
from tests.conftest import FIXTURES

MODEL = FIXTURES / "checkpoints" / "cv17"


def start_engine(endpoint: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "engine", "serve", "--endpoint", endpoint, "--model", str(MODEL), *arguments])


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@pytest.fixture
def engine(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    process = start_engine(endpoint)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
async def client(engine: subprocess.Popen[bytes], endpoint: str) -> AsyncIterator[EngineClient]:
    async with EngineClient(endpoint, hello_every_s=0.2) as client:
        yield client


def say(client: EngineClient, text: str, **fields: object) -> EngineUtterance:
    utterance = client.open(SpeechRequest(sampling=Sampling(seed=1), max_frames=20, **fields))  # type: ignore[arg-type]
    utterance.append(text)
    utterance.finish()
    return utterance


async def listen(utterance: EngineUtterance) -> tuple[bytes, Done]:
    pcm = b""
    async with asyncio.timeout(120):
        async for event in utterance:
            if isinstance(event, AudioChunk):
                assert event.position * 2 == len(pcm)
                pcm += event.pcm
            elif isinstance(event, Done):
                return pcm, event
    raise AssertionError("an utterance ended without Done")


async def test_speaks_and_says_what_it_is(client: EngineClient) -> None:
    assert "vivian" in client.info.voices and client.info.languages[0] == "auto" and client.info.sample_rate == 24000
    pcm, done = await listen(say(client, "one two three"))
    assert len(pcm) == 2 * done.samples > 0


async def test_many_at_once(client: EngineClient) -> None:
    results = await asyncio.gather(*(listen(say(client, f"number {n} speaks")) for n in range(20)))
    assert all(done.samples > 0 for _, done in results)


async def test_a_refusal_names_the_field_and_the_next_request_works(client: EngineClient) -> None:
    with pytest.raises(RequestRefused, match="serena") as caught:
        await listen(say(client, "x", voice="bob"))
    assert caught.value.code == "unknown_voice"
    await listen(say(client, "one"))


async def test_cancel_drops_what_is_queued_and_ends_once(client: EngineClient) -> None:
    # Longer than is made ahead: however late this looks, the engine has not come to its end.
    utterance = client.open(SpeechRequest(sampling=Sampling(seed=1)))
    utterance.append("the quick brown fox jumps over the lazy dog " * 30)
    utterance.finish()
    async with asyncio.timeout(120):
        async for event in utterance:
            if isinstance(event, AudioChunk):
                break
        utterance.cancel()
        utterance.cancel()
        rest = [event async for event in utterance]
    assert [type(event) for event in rest] == [Done] and isinstance(rest[0], Done) and rest[0].reason == "cancelled"
    await listen(say(client, "one"))


async def test_cancel_of_one_that_has_ended_drops_what_is_queued_too(client: EngineClient) -> None:
    utterance = say(client, "one", pace="file")
    async with asyncio.timeout(120):
        while not utterance.ended:  # noqa: ASYNC110 - it says so to nobody before it is read
            await asyncio.sleep(0.01)
        utterance.cancel()
        rest = [event async for event in utterance]
    assert [type(event) for event in rest] == [Done] and isinstance(rest[0], Done) and rest[0].reason == "end"
    utterance.cancel()


async def test_a_slow_consumer_is_given_everything(client: EngineClient) -> None:
    utterance = say(client, "the quick brown fox jumps over the lazy dog", pace="file")
    await asyncio.sleep(1.0)
    pcm, done = await listen(utterance)
    assert len(pcm) == 2 * done.samples


async def test_engine_death_and_restart(client: EngineClient, engine: subprocess.Popen[bytes], endpoint: str) -> None:
    epoch = client.epoch
    utterance = client.open(SpeechRequest())
    utterance.append("a text that never ends")
    engine.kill()
    engine.wait()
    again = start_engine(endpoint)
    try:
        with pytest.raises(EngineUnavailable):
            await listen(utterance)
        assert client.epoch != epoch
        await listen(say(client, "one two"))
    finally:
        again.terminate()
        again.wait()


async def test_no_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="no engine answered"):
        await EngineClient(f"ipc://{tmp_path}/none.sock", timeout_s=0.3).start()


async def test_close_ends_open_utterances(engine: subprocess.Popen[bytes], endpoint: str) -> None:
    client = EngineClient(endpoint)
    await client.start()
    utterance = client.open(SpeechRequest())
    await client.close()
    with pytest.raises(EngineError):
        await listen(utterance)


async def test_garbage_on_the_socket_hurts_nobody(client: EngineClient, endpoint: str) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        for body in (b"", b"\xc1", b"x" * 100_000, b"\x81\xa4type\xa4open"):
            socket.send(body)
        await listen(say(client, "one"))
    context.term()


async def test_term_ends_it_cleanly(client: EngineClient, engine: subprocess.Popen[bytes], endpoint: str) -> None:
    say(client, "the quick brown fox")
    engine.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(engine.wait, 120) == 0
    with pytest.raises(FileNotFoundError):
        os.stat(endpoint.removeprefix("ipc://"))


def test_a_bad_checkpoint_is_one_line(tmp_path: Path, endpoint: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "engine", "serve", "--endpoint", endpoint, "--model", str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: ") and "config.json" in result.stderr and "Traceback" not in result.stderr
