"""A real gateway as a process of its own, Debian's Chromium, and the page open in it.

`wav_gateway` speaks with tests/wav_engine.py, so that what the page plays can be compared with a known file; `gateway` with the
engine and the voice that a user gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import wave
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import async_playwright

from tests.browser.demo import STALLS, Demo
from tests.browser.matching import RATE, Signal, resample
from tests.gateway.stand_in import speech
from tests.stalls import StallWatch

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
AUTOPLAY = "--autoplay-policy=no-user-gesture-required"
# Nearly all of it voiced: Opus keeps such a waveform to 0.99, and that of an s or a sh only to 0.8.
KNOWN_SENTENCE = "Arrows were lowered all around our yellow wagon."
START_S = 120.0
LAUNCH_MS = 120_000


@dataclass
class Gateway:
    """A running gateway."""

    url: str
    process: subprocess.Popen[str]
    tap: Path
    """Where it leaves each utterance's PCM, as <session>-<utterance>.wav."""

    def stop(self) -> None:
        """End the process and wait for it."""
        end(self.process)


@contextmanager
def serving(folder: Path, *flags: str, rough: str = "") -> Iterator[Gateway]:
    """A gateway on a free port, from its first word to its end; behind a network as tests.browser.rough describes it."""
    tap, log = folder / "tap", folder / "gateway.log"
    tap.mkdir()
    command = [sys.executable, "-m", *(("tests.browser.rough", rough) if rough else ("gateway",)), "serve", "--port", "0", *flags]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "VIVAVOCE_TAP": str(tap)}, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            too_late = threading.Timer(START_S, process.kill)
            too_late.start()
            url = next((line.split()[-1] for line in process.stdout if "http://" in line), None)
            too_late.cancel()
            if url is None:
                pytest.fail(f"the gateway did not start:\n{log.read_text()[-2000:]}")
            yield Gateway(url, process, tap)
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, and SIGKILL for one that does not listen."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_wav(path: Path) -> Signal:
    """A mono 16-bit WAV at RATE."""
    with wave.open(str(path)) as file:
        return resample(np.frombuffer(file.readframes(file.getnframes()), "<i2"), file.getframerate())


@pytest.fixture(scope="session")
def known_wav(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seconds of speech by espeak-ng, at the engine's rate."""
    folder = tmp_path_factory.mktemp("known")
    subprocess.run(["espeak-ng", "-v", "en", "-s", "150", "-w", folder / "espeak.wav", KNOWN_SENTENCE], check=True)
    speech = read_wav(folder / "espeak.wav")
    samples = np.round(speech / np.abs(speech).max() * 0.7 * 32767).astype("<i2")
    with wave.open(str(folder / "known.wav"), "wb") as file:
        file.setparams((1, 2, RATE, len(samples), "NONE", ""))
        file.writeframes(samples.tobytes())
    return folder / "known.wav"


@pytest.fixture(scope="session")
def known(known_wav: Path) -> Signal:
    return read_wav(known_wav)


@contextmanager
def playing(wav: Path, folder: Path) -> Iterator[str]:
    """The endpoint of an engine that plays this file for every utterance."""
    endpoint = f"ipc://{folder}/engine"
    command = [sys.executable, "-m", "tests.wav_engine", "--wav", str(wav), "--endpoint", endpoint]
    with (folder / "engine.log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, text=True) as process:
        try:
            yield endpoint
        finally:
            end(process)


@pytest.fixture(scope="session")
def wav_engine(known_wav: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with playing(known_wav, tmp_path_factory.mktemp("engine")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def wav_gateway(wav_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(tmp_path_factory.mktemp("gateway"), "--engine", wav_engine) as gateway:
        yield gateway


@pytest.fixture
def brief_gateway(wav_engine: str, tmp_path: Path) -> Iterator[Gateway]:
    """One for a single test, which may stop it."""
    with serving(tmp_path, "--engine", wav_engine) as gateway:
        yield gateway


@pytest.fixture
def long_gateway(tmp_path: Path) -> Iterator[Gateway]:
    """Its utterances last a quarter of a minute, and it soon gives up listeners it does not hear of, and speech that nobody hears."""
    wav, config = tmp_path / "long.wav", tmp_path / "gateway.toml"
    with wave.open(str(wav), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(speech()[: 15 * RATE].tobytes())
    config.write_text("silent_s = 3.0\nunheard_s = 1.0\n")
    with playing(wav, tmp_path) as endpoint, serving(tmp_path, "--engine", endpoint, "--config", str(config)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


OpenDemo = Callable[[str], Awaitable[Demo]]


@asynccontextmanager
async def tabs(profile: Path, *flags: str, autoplay: bool = True, bypass_csp: bool = True) -> AsyncIterator[OpenDemo]:
    """`await open_demo(url)`: the page in a new tab of a Chromium of its own. No script of the page may have failed in the end.

    By default without the page's content security policy, which forbids the eval that Playwright waits for functions with."""
    if shutil.which(CHROMIUM) is None:
        pytest.fail(f"{CHROMIUM} is missing: apt-get install chromium")
    async with async_playwright() as playwright, AsyncExitStack() as stack:
        watch = stack.enter_context(StallWatch())
        context = await playwright.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            headless=True,
            args=[*FLAGS, *flags, *([AUTOPLAY] if autoplay else [])],
            accept_downloads=True,
            bypass_csp=bypass_csp,
            timeout=LAUNCH_MS,
        )
        if bypass_csp:
            await context.add_init_script(STALLS)
        demos: list[Demo] = []

        async def open_one(url: str) -> Demo:
            demo = Demo(await context.new_page(), watch)
            demos.append(demo)
            await demo.page.goto(url)
            return demo

        yield open_one
        await context.close()
        assert [fault for demo in demos for fault in demo.faults] == []


@pytest.fixture
async def open_demo(tmp_path: Path) -> AsyncIterator[OpenDemo]:
    """See `tabs`."""
    async with tabs(tmp_path / "profile") as open_one:
        yield open_one
