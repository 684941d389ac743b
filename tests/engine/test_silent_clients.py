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
from engine.messages import (
    Append,
    AudioChunk,
    Command,
    Event,
    Failed,
    Hello,
    Inspect,
    Open,
    Playback,
    SpeechRequest,
    Stats,
    Welcome,
    decode_event,
    encode,
)
from engine.model.checkpoint import Checkpoint
from engine.service import GONE_S, Service
from engine.stages import Stages

PATIENCE_S = 60.0


class Clock:
    """The service's, which can be put forward: so nothing here hangs on how fast this machine is."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s


class Client:
    """A bare client: says what it is told to and no Hello of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self.greet()

    def greet(self) -> None:
        self.send(Hello())
        welcome = self.event(Welcome)
        assert isinstance(welcome, Welcome)
        self.epoch = welcome.epoch

    def send(self, command: Command) -> None:
        self._socket.send(encode(command))

    def event(self, kind: type) -> Event:  # type: ignore[type-arg]
        """The next event of this kind."""
        while self._socket.poll(PATIENCE_S * 1000):
            event = decode_event.decode(self._socket.recv())
            if isinstance(event, kind):
                return event
        raise AssertionError(f"no {kind.__name__} came")

    def held(self) -> tuple[int, int]:
        """Slots and places in the queue that are taken, once everything this client has said before has been heard. What others have said
        may come later: who opens something is to ask itself."""
        self.send(Inspect())
        stats = self.event(Stats)
        assert isinstance(stats, Stats)
        return stats.slots_used, stats.waiting

    def sees_all_freed(self) -> bool:
        """Whether the engine lets go of everything in the end."""
        begun_s = time.monotonic()
        while self.held() != (0, 0):
            if time.monotonic() > begun_s + PATIENCE_S:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    return clock


@pytest.fixture
def endpoint(tiny: Checkpoint, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, clock: Clock) -> Iterator[str]:
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


def test_one_that_was_killed_holds_no_place(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, clock: Clock) -> None:
    doomed, other = Client(context, endpoint), Client(context, endpoint)
    # The first waits for text, the second for its listener, who hears nothing of what is made.
    for number, text in ((1, ""), (2, "a text that goes on and on. " * 40)):
        doomed.send(Open(doomed.epoch, number, SpeechRequest()))
        doomed.send(Playback(doomed.epoch, number, 0, False, True))
        doomed.send(Append(doomed.epoch, number, text))
    made_s = 0.0
    while made_s < LATENCY.ahead_s:
        chunk = doomed.event(AudioChunk)
        assert isinstance(chunk, AudioChunk)
        made_s += len(chunk.pcm) / 2 / 24_000
    assert doomed.held() == (1, 1)
    doomed.close()
    clock.skipped_s += GONE_S / 2
    other.greet()
    clock.skipped_s += GONE_S
    assert other.sees_all_freed()
    other.close()


def test_one_that_was_only_silent_is_told(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, clock: Clock) -> None:
    silent, other = Client(context, endpoint), Client(context, endpoint)
    silent.send(Open(silent.epoch, 1, SpeechRequest()))
    assert silent.held() == (0, 1)
    clock.skipped_s += GONE_S / 2
    assert other.held() == (0, 1), "it may be slow"
    clock.skipped_s += GONE_S
    assert other.sees_all_freed()
    failed = silent.event(Failed)
    assert isinstance(failed, Failed) and (failed.utterance, failed.code, failed.retryable) == (1, "engine_unavailable", True)
    silent.send(Open(silent.epoch, 2, SpeechRequest()))
    assert silent.held() == (0, 1), "it is as welcome as before"
    for client in (silent, other):
        client.close()


def test_one_that_greets_keeps_its_place(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, clock: Clock) -> None:
    slow, other = Client(context, endpoint), Client(context, endpoint)
    slow.send(Open(slow.epoch, 1, SpeechRequest()))
    for _ in range(5):
        clock.skipped_s += GONE_S / 2
        slow.greet()
        # The engine looks for who is gone once a turn, so the second answer comes after a look.
        assert other.held() == other.held() == (0, 1)
    for client in (slow, other):
        client.close()
