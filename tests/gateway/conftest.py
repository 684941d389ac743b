"""A gateway on a real socket, an engine to speak with, a WebSocket client and an aiortc listener.

The engine is the stand-in of stand_in.py; `VIVAVOCE_TEST_ENGINE=ENDPOINT` runs the tests that do not look inside it on another."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.pool import EnginePool
from tests.gateway.clients import Listener, Speaker
from tests.gateway.stand_in import StandInEngine

Client = TestClient[web.Request, web.Application]


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
