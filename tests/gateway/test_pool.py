"""The engine process: started, watched, started again, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from engine import EngineUnavailable
from gateway import pool as pool_module
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.pool import EnginePool
from tests.gateway.clients import Speaker

STAND_IN = (sys.executable, "-m", "tests.gateway.stand_in")


def engine_pid() -> int:
    """The stand-in started by this process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"tests.gateway.stand_in" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except FileNotFoundError:
                continue
    raise AssertionError("no engine process")


async def test_an_engine_that_dies_is_an_error_and_comes_back() -> None:
    async with EnginePool(GatewayConfig(), STAND_IN) as engines, TestClient(TestServer(create_app(GatewayConfig(), engines))) as client:
        async with client.get("/ready") as response:
            assert response.status == 503 and "starting" in (await response.json())["reason"]
        speaker = await Speaker.connect(client)
        await speaker.send("session.update")
        assert (await speaker.event("error"))["code"] == "engine_unavailable"
        await engines.first_start()
        async with client.get("/ready") as response:
            assert response.status == 200
        await speaker.send("session.update")
        await speaker.event("session.updated")
        await speaker.send("text.append", text="A sentence that will not be heard to its end, for the engine dies.")
        await speaker.event("utterance.started")
        pid = engine_pid()
        os.kill(pid, signal.SIGKILL)
        error = await speaker.event("error")
        assert (error["code"], error["retryable"], error["utterance"]) == ("engine_unavailable", True, 1)
        assert (await speaker.event("utterance.done"))["reason"] == "error"
        async with client.get("/ready") as response:
            assert response.status == 503 and (await response.json())["reason"]
        deadline_s = time.monotonic() + 60
        while engines.unready:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)
        async with client.get("/metrics") as response:
            assert "vivavoce_engine_restarts_total 1.0" in await response.text()
        done = await speaker.say("Here again.")
        assert (done["utterance"], done["reason"]) == (2, "end")
        pid = engine_pid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_first_start_that_fails_is_told_and_not_tried_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "BACKOFF_S", (0.01,))
    async with EnginePool(GatewayConfig(), (sys.executable, "-c", "import sys; sys.exit(3)")) as engines:
        with pytest.raises(EngineUnavailable, match="status 3"):
            await asyncio.wait_for(engines.first_start(), 60)
        await asyncio.sleep(0.3)
        assert engines.unready == "the engine process ended with status 3"
    assert "trying again" not in caplog.text


async def test_a_wrong_model_folder_is_told_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--model", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, told = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1 and b"trying again" not in told
    assert f"error: {tmp_path}".encode() in told and b"config.json" in told
    assert told.splitlines()[-1].startswith(b"vivavoce: the engine process ended with status 2")


@pytest.mark.real_time
async def test_an_engine_that_never_answers_is_told_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "STOP_S", 0.3)
    deaf = (sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    begun_s = time.monotonic()
    async with EnginePool(GatewayConfig(engine_start_s=1.0), deaf) as engines:
        with pytest.raises(EngineUnavailable, match="no engine answered"):
            await engines.first_start()
    assert time.monotonic() - begun_s < 5


async def test_what_is_set_for_an_engine_reaches_the_one_that_is_started(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = (sys.executable, "-c", f"import pathlib, sys; pathlib.Path({str(told)!r}).write_text(' '.join(sys.argv[1:])); sys.exit(3)")
    async with EnginePool(GatewayConfig(device="cuda:1", profile="throughput", slots=40), command) as engines:
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(engines.first_start(), 60)
    assert told.read_text().endswith("--device cuda:1 --profile throughput --slots 40")
