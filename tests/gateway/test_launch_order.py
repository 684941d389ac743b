"""The engine serves listeners by what they report. The real loop and scheduler behind ZeroMQ, real gateway, scripted listeners; what
the engine did is in its trace."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import wave
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.keys import SESSIONS
from tests.gateway.clients import Listener, Speaker
from tests.gateway.stand_in import RATE, speech

pytestmark = pytest.mark.real_time
ROOT = Path(__file__).parents[2]
FRAME_COST_S = 0.004
SECONDS = 12


@dataclass
class Traced:
    """An engine in a process of its own that plays a file of SECONDS for every utterance; `launches` ends it and tells what it did."""

    process: subprocess.Popen[bytes]
    trace: Path

    def launches(self) -> list[dict[str, object]]:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)
        return [json.loads(entry) for entry in self.trace.read_text().splitlines()]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/traced"


@pytest.fixture
def traced(endpoint: str, tmp_path: Path) -> Iterator[Traced]:
    with wave.open(str(tmp_path / "speech.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(speech()[: SECONDS * RATE].tobytes())
    command = [sys.executable, "-m", "tests.wav_engine", "--wav", str(tmp_path / "speech.wav"), "--endpoint", endpoint]
    command += ["--frame-cost", str(FRAME_COST_S), "--trace", str(tmp_path / "trace")]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        yield Traced(process, tmp_path / "trace")
        process.kill()


@pytest.fixture
def config(config: GatewayConfig, traced: Traced) -> GatewayConfig:
    """The engine is there before the gateway looks for it."""
    return config


@pytest.fixture
async def calls(connect, listen) -> AsyncIterator[list[tuple[Speaker, Listener]]]:
    """Four sessions with a listener each, all alike."""
    made = []
    for _ in range(4):
        speaker = await connect("webrtc")
        made.append((speaker, await listen(speaker, channel=True)))
    yield made


async def say_together(calls: list[tuple[Speaker, Listener]]) -> None:
    for speaker, _ in calls:
        await speaker.send("text.append", text="All of them say the same sentence at the same time.")
        await speaker.send("text.end")
        await speaker.event("utterance.started")


def decoded(launches: list[dict[str, object]], number: int) -> list[tuple[float, int]]:
    """When the engine made how many frames of this utterance into sound."""
    return [(entry["ends_s"], entry["frames"]) for entry in launches if entry["stage"] == "CODEC" and number in entry["rows"]]  # type: ignore[misc,operator]


async def test_who_is_paused_is_served_last(calls, traced: Traced) -> None:
    """Two that are equal at the server: both are sent the same in the same moment. One does not play it."""
    (_, playing), (_, paused), *_ = calls
    playing.play()
    paused.play()
    await asyncio.sleep(0.5)
    await say_together(calls[:2])
    paused.pause()
    await asyncio.sleep(4.0)
    paused_for = (await calls[1][0].event("playback"), len(paused.arrivals))
    launches = traced.launches()
    first, second = decoded(launches, 1), decoded(launches, 2)
    begun_s = first[0][0]
    made_s = [sum(frames for at_s, frames in of if at_s < begun_s + 4.0) * 0.08 for of in (first, second)]
    assert made_s[0] >= 6.0, "who plays is kept three seconds ahead of what is heard"
    assert made_s[1] <= 4.0, "who does not is not given what it can not hear"
    assert all(at_s < begun_s + 2.0 for at_s, _ in second), "and does not take a launch from who does"
    assert paused_for[0]["measured"] and paused_for[1] < 60


async def test_a_liar_among_four_starves_nobody(calls, gateway, traced: Traced) -> None:
    """It says that it has played all there is, over and over; the others say nothing, or the truth."""
    liar = calls[0][1]
    calls[1][1].play()
    calls[2][1].play()
    await asyncio.sleep(0.5)
    await say_together(calls)

    async def lie() -> None:
        while True:
            for claim in ({"rtp_time": liar.arrivals[-1][1]}, {"rtp_time": (liar.arrivals[-1][1] + 96000) % 2**32}, {"rtp_time": 0}):
                liar.report(**claim, age_ms=1e9, rtt_ms=1e9)
                await asyncio.sleep(0.03)

    lying = asyncio.create_task(lie())
    await asyncio.sleep(5.0)
    lying.cancel()
    launches = traced.launches()
    made_s = [0.08 * sum(frames for _, frames in decoded(launches, number)) for number in (1, 2, 3, 4)]
    # They begin one after the other, so each is measured against its own beginning.
    ended_s = max(float(entry["ends_s"]) for entry in launches)  # type: ignore[arg-type]
    liars_s, *ahead_s = [made - (ended_s - decoded(launches, number)[0][0]) for number, made in enumerate(made_s, 1)]
    chunk_s = 8 * 0.08
    assert max(ahead_s) - min(ahead_s) <= chunk_s + 0.1, "who tells the truth and who says nothing are a chunk apart at most, and an estimate's error"
    assert liars_s - min(ahead_s) <= chunk_s + 0.1, "the liar gains nothing; to say that it stands still costs it what it has"
    assert min(made_s) > 5.0
    assert [session.media.underruns for session in gateway.app[SESSIONS]._open.values()] == [0, 0, 0, 0]
