"""A gateway on a real socket, an engine to speak with, a WebSocket client and an aiortc listener.

The engine is the stand-in of stand_in.py; `VIVAVOCE_TEST_ENGINE=ENDPOINT` runs the tests that do not look inside it on another.

A test marked `real_time` measures when something happens by the clock, and can say nothing of a run in which the machine stood still
(tests.stalls). If it fails in such a run, that run is void: it is told at the end, and the test is run again. In a run without, it fails."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.pool import EnginePool
from tests.gateway.clients import Listener, Speaker
from tests.gateway.stand_in import StandInEngine
from tests.stalls import StallWatch

Client = TestClient[web.Request, web.Application]
STOOD_S = 0.02
"""A packet."""
RUNS = 3
"""Of a test in real time, at most; the last one counts in any case."""
VOID = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_time: measures by the clock; a run in which the machine stood still is void (tests/gateway/conftest.py)")
    config.stash[VOID] = []


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("real_time") is None:
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for run in range(1, RUNS + 1):
        with StallWatch() as watch:
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if not any(report.failed for report in reports) or watch.longest_s < STOOD_S or run == RUNS:
            break
        item.config.stash[VOID].append(f"{item.nodeid}: the machine stood still for {watch.longest_s:.2f} s, so its failure says nothing; run again")
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash[VOID]:
        terminalreporter.line(line)


class Server(TestServer):
    """aiohttp's own test server cancels a handler whose client has gone; the gateway's, as every server by default, does not."""

    async def _make_runner(self, **settings: Any) -> web.BaseRunner[web.Request]:
        return await super()._make_runner(**settings | {"handler_cancellation": False})


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[StandInEngine]:
    async with StandInEngine(f"ipc://{tmp_path}/engine") as engine:
        yield engine


@pytest.fixture
def endpoint(engine: StandInEngine) -> str:
    return os.environ.get("VIVAVOCE_TEST_ENGINE", engine.endpoint)


@pytest.fixture
def config(endpoint: str) -> GatewayConfig:
    return GatewayConfig(engine=endpoint, max_append_chars=400, max_utterance_chars=1000, max_waiting_utterances=8, max_sessions=8)


@asynccontextmanager
async def serving(config: GatewayConfig) -> AsyncIterator[Client]:
    async with EnginePool(config) as engines, TestClient(Server(create_app(config, engines))) as client:
        await engines.first_start()
        yield client


@pytest.fixture
async def gateway(config: GatewayConfig) -> AsyncIterator[Client]:
    async with serving(config) as client:
        yield client


@pytest.fixture
async def connect(gateway: Client) -> AsyncIterator[Callable[..., Awaitable[Speaker]]]:
    """`await connect()`: a session set up for PCM; `connect(audio="webrtc")`; `connect(audio=None)`: not set up."""
    speakers: list[Speaker] = []

    async def open_session(audio: str | None = "pcm_s16le") -> Speaker:
        speaker = await Speaker.connect(gateway)
        speakers.append(speaker)
        if audio is not None:
            await speaker.send("session.update", audio={"format": audio})
            await speaker.event("session.updated")
        return speaker

    yield open_session
    for speaker in speakers:
        await speaker.close()


@pytest.fixture
async def listen(gateway: Client) -> AsyncIterator[Callable[..., Awaitable[Listener]]]:
    """`await listen(speaker)`: an aiortc listener of its session, connected."""
    listeners: list[Listener] = []

    async def open_listener(speaker: Speaker, token: str = "token", **options: Any) -> Listener:
        listener = Listener(gateway)
        listeners.append(listener)
        await listener.connect(speaker.created[token], **options)
        return listener

    yield open_listener
    for listener in listeners:
        await listener.close()
