"""EngineClient: the asyncio side of an engine process. Needs no torch."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType

import msgspec
import zmq

from engine.errors import EngineError, EngineUnavailable, Overloaded, RequestRefused, UtteranceFailed
from engine.messages import (
    PROTOCOL_VERSION,
    Append,
    AudioChunk,
    Cancel,
    Command,
    Credit,
    Done,
    EngineInfo,
    Event,
    Failed,
    Finish,
    Hello,
    Inspect,
    Open,
    Playback,
    SpeechRequest,
    Started,
    Stats,
    Unwelcome,
    Welcome,
    decode_event,
    encode,
)

log = logging.getLogger(__name__)

CREDIT_STEP_S = 1.0
AT_ONCE = 64
"""Messages taken before others on the event loop have their turn."""
_ERRORS = {kind.code: kind for kind in (EngineUnavailable, Overloaded, UtteranceFailed)}


class EngineUtterance:
    """One utterance in the making. Iterate it for `Started`, `AudioChunk`s and one `Done`; `EngineError` is raised where the engine failed it.

    All methods return at once and may be called in any order; once it has ended they say nothing to the engine."""

    def __init__(self, client: EngineClient, number: int) -> None:
        self.number = number
        self.ended = False
        self._client = client
        self._events: deque[Event | EngineError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._consumed = 0
        self._credited = 0

    def append(self, text: str) -> None:
        """More text; an empty string does nothing. Raises RequestRefused for half of a surrogate pair."""
        if text and not self.ended:
            self._client._send(Append(self._client.epoch, self.number, text))

    def finish(self) -> None:
        """No more text will come."""
        if not self.ended:
            self._client._send(Finish(self._client.epoch, self.number))

    def cancel(self) -> None:
        """Stop now: chunks already queued here are dropped. `Done(reason="cancelled")` follows, or the end that has come already."""
        if self.ended:
            while len(self._events) > 1:
                self._events.popleft()
            return
        self._events.clear()
        self._client._cancelled.add(self.number)
        self._client._send(Cancel(self._client.epoch, self.number))

    def playback(self, heard: int, playing: bool, measured: bool) -> None:
        """Tell the scheduler how many samples the listener has heard (engine.playback)."""
        if not self.ended:
            self._client._send(Playback(self._client.epoch, self.number, heard, playing, measured))

    async def __aiter__(self) -> AsyncIterator[Started | AudioChunk | Done]:
        while True:
            while not self._events:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            event = self._events.popleft()
            if isinstance(event, EngineError):
                raise event
            if isinstance(event, AudioChunk):
                self._consumed = event.position + len(event.pcm) // 2
                if self._consumed - self._credited >= CREDIT_STEP_S * self._client.info.sample_rate and not self.ended:
                    self._credited = self._consumed
                    self._client._send(Credit(self._client.epoch, self.number, self._consumed))
                yield event
            elif isinstance(event, Started):
                yield event
            elif isinstance(event, Done):
                yield event
                return

    def _deliver(self, event: Event | EngineError) -> None:
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """A connection to one engine process.

    `async with EngineClient(endpoint) as client:` connects and waits for the engine's Welcome (`EngineUnavailable` after
    `timeout_s`). If the engine restarts, open utterances end with `EngineUnavailable` and new ones go to the new epoch."""

    def __init__(self, endpoint: str, *, timeout_s: float = 60.0, hello_every_s: float = 1.0) -> None:
        self.endpoint = endpoint
        self.epoch = 0
        self.stats: Stats | None = None
        """The engine's last answer to `inspect`."""
        self._timeout_s = timeout_s
        self._hello_every_s = hello_every_s
        self._info: EngineInfo | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        # Not zmq.asyncio's: a future for each message costs several times what the message does.
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        self._looking = False
        self._tasks: list[asyncio.Task[None]] = []
        self._welcomed = asyncio.Event()
        self._utterances: dict[int, EngineUtterance] = {}
        self._cancelled: set[int] = set()
        self._next = 1
        self._refusal: EngineUnavailable | None = None
        self._last_welcome_s = 0.0

    @property
    def info(self) -> EngineInfo:
        """The engine's description; valid after `start`."""
        if self._info is None:
            raise EngineUnavailable(f"no engine has answered at {self.endpoint}")
        return self._info

    @property
    def alive(self) -> bool:
        """Whether the engine answered a Hello in the last few seconds."""
        now_s = asyncio.get_running_loop().time()
        return self._info is not None and now_s - self._last_welcome_s < 5 * self._hello_every_s

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect and wait for the engine. Raises EngineUnavailable after `timeout_s`, or if the engine speaks another protocol version."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            await self.close()
            raise EngineUnavailable(
                f"engine: {self.endpoint!r} is no ZeroMQ endpoint ({error.strerror}); write ipc://PATH or tcp://HOST:PORT"
            ) from None
        self._descriptor = self._socket.fileno()
        asyncio.get_running_loop().add_reader(self._descriptor, self._receive)
        self._tasks = [asyncio.create_task(self._greet(), name="engine-hello")]
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._welcomed.wait()
        except TimeoutError:
            await self.close()
            raise EngineUnavailable(f"no engine answered at {self.endpoint} within {self._timeout_s:g} s") from None
        except BaseException:
            # Also when cancelled: a context that is collected with an open socket blocks for good.
            await self.close()
            raise
        if self._refusal is not None:
            await self.close()
            raise self._refusal

    async def close(self) -> None:
        """Drop the connection; open utterances end with EngineUnavailable."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._lose("the connection to the engine was closed")
        if self._socket is not None:
            if self._descriptor >= 0:
                asyncio.get_running_loop().remove_reader(self._descriptor)
                self._descriptor = -1
            self._socket.close(linger=0)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def open(self, request: SpeechRequest, text: str = "", *, finished: bool = False) -> EngineUtterance:
        """Begin an utterance with text that is there already, all of it if `finished`; refusals (unknown voice, ...) arrive when it is iterated,
        but for what no message can carry: that raises RequestRefused here."""
        utterance = EngineUtterance(self, self._next)
        self._send(Open(self.epoch, utterance.number, request, text, finished))
        self._next += 1
        self._utterances[utterance.number] = utterance
        return utterance

    def inspect(self) -> None:
        """Ask the engine how it is doing; its answer goes to `stats`. Raises EngineUnavailable when closed."""
        self._send(Inspect())

    def _send(self, message: Command) -> None:
        if self._socket is None:
            raise EngineUnavailable("the engine client is closed")
        try:
            body = encode(message)
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise RequestRefused(f"text: {half} is half of a surrogate pair and no character; send both halves in one piece") from None
        except (OverflowError, TypeError) as error:
            raise RequestRefused(f"request: {error}; see SpeechRequest and Sampling for the ranges") from None
        # With no high-water mark a DEALER send completes at once.
        self._socket.send(body, zmq.NOBLOCK)
        self._look()

    async def _greet(self) -> None:
        while True:
            self._send(Hello())
            await asyncio.sleep(self._hello_every_s)

    def _look(self) -> None:
        """Have `_receive` run soon: the descriptor tells of a change once, and whatever else used the socket may have taken that."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        """Take what waits."""
        self._looking = False
        for _ in range(AT_ONCE):
            if self._socket is None:
                return
            try:
                body = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                event = decode_event.decode(body)
            except msgspec.DecodeError:
                log.exception("undecodable message from the engine at %s", self.endpoint)
                continue
            self._dispatch(event)
        self._look()

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, Welcome):
            if self.epoch and event.epoch != self.epoch:
                self._lose("the engine restarted in mid-utterance")
            self.epoch, self._info = event.epoch, event.info
            self._last_welcome_s = asyncio.get_running_loop().time()
            self._welcomed.set()
            return
        if isinstance(event, Unwelcome):
            self._turn_away(event.version)
            return
        if isinstance(event, Stats):
            self.stats = event
            return
        utterance = self._utterances.get(event.utterance)
        if utterance is None or event.epoch != self.epoch:
            return
        if isinstance(event, AudioChunk) and event.utterance in self._cancelled:
            return
        if isinstance(event, Done | Failed):
            utterance.ended = True
            del self._utterances[event.utterance]
            self._cancelled.discard(event.utterance)
        if isinstance(event, Failed):
            kind = _ERRORS.get(event.code, EngineError if event.retryable else RequestRefused)
            utterance._deliver(kind(event.message, code=event.code, retryable=event.retryable, retry_after_s=event.retry_after_s))
        else:
            utterance._deliver(event)

    def _turn_away(self, version: int) -> None:
        what = f"the engine at {self.endpoint} speaks protocol version {version}, this client {PROTOCOL_VERSION}; install the same release for both"
        self._refusal = EngineUnavailable(what, code="version_mismatch", retryable=False)
        # An engine of another version may have taken the place of the one before.
        self._info = None
        self._lose(what)
        self._welcomed.set()

    def _lose(self, why: str) -> None:
        for utterance in self._utterances.values():
            utterance.ended = True
            utterance._deliver(EngineUnavailable(why))
        self._utterances.clear()
        self._cancelled.clear()
