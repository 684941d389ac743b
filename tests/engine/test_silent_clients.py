"""A client that is gone holds no place in the engine, also where nothing is sent to it that could tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine import service
from engine.config import LATENCY
from engine.messages import Append, Command, Event, Failed, Hello, Inspect, Open, Playback, SpeechRequest, Stats, Welcome, decode_event, encode
from engine.model.checkpoint import Checkpoint
from engine.service import Service
from engine.stages import Stages

GONE_S = 1.0


class Client:
    """A bare client: says what it is told to and no Hello of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self.send(Hello())
        self.epoch = self.event(Welcome).epoch

    def send(self, command: Command) -> None:
        self._socket.send(encode(command))

    def event(self, kind: type) -> Event:  # type: ignore[type-arg]
        """The next event of this kind."""
        while self._socket.poll(5000):
            event = decode_event.decode(self._socket.recv())
            if isinstance(event, kind):
                return event
        raise AssertionError(f"no {kind.__name__} came")

    def held(self) -> tuple[int, int]:
        """Slots and places in the queue that are taken."""
        self.send(Inspect())
        stats = self.event(Stats)
        assert isinstance(stats, Stats)
        return stats.slots_used, stats.waiting

    def freed_after_s(self) -> float:
        """How long the engine goes on holding anything."""
        begun_s = time.monotonic()
        while self.held() != (0, 0):
            assert time.monotonic() < begun_s + 10, "never"
            time.sleep(0.05)
        return time.monotonic() - begun_s

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def endpoint(tiny: Checkpoint, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(service, "GONE_S", GONE_S)
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(f"ipc://{tmp_path}/engine")
    served = Service(socket, Stages(tiny, LATENCY), LATENCY)
    thread = threading.Thread(target=served.run)
    thread.start()
    yield f"ipc://{tmp_path}/engine"
    served.stop(0, None)
    thread.join()
    socket.close(linger=0)


def test_one_that_was_killed_holds_no_place(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    doomed, other = Client(context, endpoint), Client(context, endpoint)
    # The first waits for text, the second for its listener, who has heard nothing of what was made.
    for number, text in ((1, ""), (2, "a text that goes on and on. " * 40)):
        doomed.send(Open(doomed.epoch, number, SpeechRequest()))
        doomed.send(Append(doomed.epoch, number, text))
    for _ in range(20):
        doomed.send(Playback(doomed.epoch, 2, 0, False, True))
        time.sleep(0.05)
    assert sum(other.held()) == 2
    doomed.close()
    assert other.freed_after_s() < 2 * GONE_S + 1
    other.close()


def test_one_that_was_only_silent_is_told(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    silent, other = Client(context, endpoint), Client(context, endpoint)
    silent.send(Open(silent.epoch, 1, SpeechRequest()))
    assert other.held() == (0, 1)
    assert other.freed_after_s() > GONE_S / 2
    failed = silent.event(Failed)
    assert isinstance(failed, Failed) and (failed.utterance, failed.code, failed.retryable) == (1, "engine_unavailable", True)
    silent.send(Open(silent.epoch, 2, SpeechRequest()))
    assert other.held() == (0, 1), "it is as welcome as before"
    for client in (silent, other):
        client.close()


def test_one_that_greets_keeps_its_place(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    slow, other = Client(context, endpoint), Client(context, endpoint)
    slow.send(Open(slow.epoch, 1, SpeechRequest()))
    for _ in range(10):
        slow.send(Hello())
        time.sleep(GONE_S / 4)
        assert other.held() == (0, 1)
    for client in (slow, other):
        client.close()
