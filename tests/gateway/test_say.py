"""`vivavoce say`: a process that speaks what is piped into it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
import wave
from collections.abc import Awaitable, Callable
from pathlib import Path

import av
import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.pool import EnginePool
from gateway.say import AHEAD_CHARS, CUT_CHARS, cut
from tests.gateway.clients import until
from tests.gateway.conftest import Client, Server
from tests.gateway.stand_in import SAMPLES_PER_CHAR, StandInEngine

Say = Callable[..., Awaitable[asyncio.subprocess.Process]]
TEXT = "The meeting starts at seven."
ENDS_S = 120.0
"""Within which the command is through, its start included, on a machine that is busy with something else."""


@pytest.fixture
def say(gateway: Client) -> Say:
    """`await say("--out", name, VIVAVOCE_PLAYER="...")`: the command against the test's gateway, its pipes open."""

    async def started(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "gateway", "say", "--gateway", str(gateway.make_url("")), *arguments]
        pipe = asyncio.subprocess.PIPE
        environment |= {"PYTHONFAULTHANDLER": "1"}
        return await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | environment, preexec_fn=interruptible
        )

    return started


def interruptible() -> None:
    """A shell that starts the tests in the background has them ignore interrupts, and all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def ended(process: asyncio.subprocess.Process, text: bytes | None = None, status: int = 0) -> tuple[bytes, str]:
    """Give it the rest of its input and wait: what it wrote, and what it said."""
    try:
        async with asyncio.timeout(ENDS_S):
            out, said = await process.communicate(text)
    except TimeoutError:
        # Its threads say where they are.
        process.send_signal(signal.SIGABRT)
        _, said = await process.communicate()
        pytest.fail(f"it does not end:\n{said.decode()}")
    assert process.returncode == status, said.decode()
    return out, said.decode()


def samples(file: Path) -> np.ndarray:
    with wave.open(str(file)) as opened:
        assert (opened.getframerate(), opened.getnchannels(), opened.getsampwidth()) == (24000, 1, 2)
        return np.frombuffer(opened.readframes(opened.getnframes()), "<i2")


async def test_a_wav_file_with_its_true_length(say: Say, engine: StandInEngine, tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    _, said = await ended(await say("--out", str(file), "--voice", "ryan", "--language", "german"), TEXT.encode())
    assert said == ""
    assert samples(file).tobytes() == bytes(engine.utterances[0].pcm) and file.stat().st_size == 44 + len(engine.utterances[0].pcm)
    request = engine.utterances[0].request
    assert (request.voice, request.language, request.pace, engine.utterances[0].text) == ("Ryan", "german", "file", TEXT)


async def test_words_as_arguments_and_raw_sound_on_standard_output(say: Say, engine: StandInEngine) -> None:
    out, _ = await ended(await say("--out", "-", "The", "meeting", "starts."))
    assert out == bytes(engine.utterances[0].pcm) and engine.utterances[0].text == "The meeting starts."


@pytest.mark.parametrize(("suffix", "codec"), [("opus", "opus"), ("ogg", "opus"), ("mp3", "mp3float"), ("flac", "flac"), ("aac", "aac")])
async def test_other_files(say: Say, engine: StandInEngine, tmp_path: Path, suffix: str, codec: str) -> None:
    file = tmp_path / f"speech.{suffix}"
    await ended(await say("--out", str(file), TEXT))
    with av.open(str(file)) as opened:
        assert opened.streams.audio[0].codec_context.name in (codec, codec.removesuffix("float"), f"lib{codec}")
        decoded = sum(frame.samples / frame.sample_rate for frame in opened.decode(audio=0))
    assert decoded == pytest.approx(len(TEXT) * 0.06, abs=0.1)


async def test_it_speaks_while_the_text_is_still_coming(say: Say, engine: StandInEngine, tmp_path: Path) -> None:
    file = tmp_path / "played.raw"
    engine.idle_s = ENDS_S
    process = await say(VIVAVOCE_PLAYER=f"sh -c 'cat > {file}'")
    assert process.stdin is not None
    # A character cut in two by the pipe comes whole.
    for piece in (b"The first word", b"s are heard caf\xc3", b"\xa9 "):
        process.stdin.write(piece)
        await process.stdin.drain()
        await asyncio.sleep(0.3)
    await until(lambda: file.exists() and file.stat().st_size, ENDS_S)
    assert process.returncode is None
    await ended(process, b"before the last.")
    (utterance,) = engine.utterances
    assert utterance.text == "The first words are heard caf\u00e9 before the last."
    assert utterance.request.pace == "live" and file.read_bytes() == bytes(utterance.pcm)


@pytest.mark.real_time
async def test_a_long_text_goes_out_in_utterances_and_none_of_it_is_lost(say: Say, engine: StandInEngine, tmp_path: Path) -> None:
    # The test's gateway takes 400 characters at once and 1,000 in an utterance.
    engine.frame_s = 0.0005
    text = " ".join(f"This is sentence number {number}, and it is said like all others." for number in range(80))
    file = tmp_path / "book.wav"
    begun_s = time.monotonic()
    await ended(await say("--out", str(file)), text.encode())
    assert "".join(utterance.text for utterance in engine.utterances) == text
    assert len(engine.utterances) > 5 and all(utterance.text.rstrip().endswith(".") for utterance in engine.utterances)
    assert len(samples(file)) == len(text) * SAMPLES_PER_CHAR
    # Nobody waits for it, so it is not made in the time it takes to hear it (five minutes).
    assert time.monotonic() - begun_s < 60


@pytest.mark.parametrize(
    ("arguments", "text", "says"),
    [
        (["--out", "x.txt"], "Hi.", r"--out x.txt: the name's end must say the format: .aac"),
        (["--out", "/nowhere/x.wav"], "Hi.", r"--out /nowhere/x.wav: No such file"),
        (["--out", "-", "--voice", "nobody"], "Hi.", r"voice: none is called 'nobody'; the checkpoint has: Vivian, Ryan"),
        (["--out", "-"], "", r"there is nothing to say: give words"),
        (["--out", "-"], " \n\U0001f600", r"nothing to say in this text"),
        (["--out", "-"], "Broken {fail}", r"it was told to fail \(utterance_failed\)"),
    ],
)
async def test_what_cannot_be_done_is_one_line(say: Say, arguments: list[str], text: str, says: str) -> None:
    _, said = await ended(await say(*arguments), text.encode(), status=1)
    assert re.search(f"^vivavoce: .*{says}", said) and said.count("\n") == 1


async def test_no_sound_device(say: Say, tmp_path: Path) -> None:
    for name in ("pacat", "aplay"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{name}: cannot find a card' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    _, said = await ended(await say(TEXT, PATH=str(tmp_path)), status=1)
    assert said == (
        "vivavoce: there is no sound device (pacat: pacat: cannot find a card; aplay: aplay: cannot find a card); write a file with --out FILE\n"
    )
    _, said = await ended(await say(TEXT, PATH="/nowhere"), status=1)
    assert said.startswith("vivavoce: no player is installed: install alsa-utils") and "--out FILE" in said
    _, said = await ended(await say(TEXT * 20, VIVAVOCE_PLAYER="sh -c 'sleep 1; echo gone >&2; exit 3'"), status=1)
    assert "the sound broke off (sh: gone)" in said


async def test_the_second_player_is_taken_where_the_first_finds_nothing(say: Say, engine: StandInEngine, tmp_path: Path) -> None:
    (tmp_path / "pacat").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "aplay").write_text(f"#!/bin/sh\nexec /bin/cat > {tmp_path}/heard\n")
    for name in ("pacat", "aplay"):
        (tmp_path / name).chmod(0o755)
    await ended(await say(TEXT, PATH=str(tmp_path)))
    assert (tmp_path / "heard").read_bytes() == bytes(engine.utterances[0].pcm)


async def test_interrupted_it_stops_the_player(say: Say, tmp_path: Path) -> None:
    process = await say("Long. " * 200, VIVAVOCE_PLAYER=f"sh -c 'echo $$ > {tmp_path}/pid; exec cat > {tmp_path}/heard'")
    await until(lambda: (tmp_path / "heard").exists() and (tmp_path / "heard").stat().st_size, ENDS_S)
    process.send_signal(2)
    await ended(process, status=130)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_a_gateway_that_wants_a_key(config: GatewayConfig, tmp_path: Path) -> None:
    key = "correct-horse-battery-staple"
    changed = msgspec.structs.replace(config, api_keys=[key])
    async with EnginePool(changed) as engines, TestClient(Server(create_app(changed, engines))) as client:
        await engines.first_start()
        command = [sys.executable, "-m", "gateway", "say", "--gateway", str(client.make_url("")), "--out", str(tmp_path / "x.wav"), TEXT]
        for given, status in (("", 1), (key, 0)):
            process = await asyncio.create_subprocess_exec(*command, env=os.environ | {"VIVAVOCE_API_KEY": given}, stderr=asyncio.subprocess.PIPE)
            _, said = await ended(process, status=status)
            assert status == 0 or ("an API key is needed" in said and "VIVAVOCE_API_KEY" in said)


async def test_without_a_gateway_it_starts_its_own(endpoint: str, engine: StandInEngine, tmp_path: Path) -> None:
    file = tmp_path / "x.wav"
    command = [sys.executable, "-m", "gateway", "say", "--engine", endpoint, "--set", "port=1", "--out", str(file), TEXT]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await ended(process)
    assert samples(file).tobytes() == bytes(engine.utterances[0].pcm) and said == ""


async def test_a_gateway_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway", "say", "--gateway", "http://127.0.0.1:9", "--out", str(tmp_path / "x.wav"), TEXT]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await ended(process, status=1)
    assert said.startswith("vivavoce: http://127.0.0.1:9: cannot connect") and said.count("\n") == 1


def test_where_utterances_are_cut() -> None:
    assert cut("Short. And short.", 0) == [("Short. And short.", False)]
    assert cut(" one. Two", CUT_CHARS) == [(" one.", True), (" Two", False)]
    assert cut("3.5 and e.g. x", CUT_CHARS) == [("3.5 and e.g.", True), (" x", False)]
    assert cut("\u3053\u3093\u3002\u306b\u3061", CUT_CHARS) == [("\u3053\u3093\u3002", True), ("\u306b\u3061", False)]
    assert cut("no end in sight", 2 * CUT_CHARS) == [("no end in ", True), ("sight", False)]
    assert cut("", 0) == []
    assert AHEAD_CHARS > 2 * CUT_CHARS
