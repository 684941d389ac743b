"""The load one client process makes: requests at their planned times whatever became of those before, or listeners who never stop listening.

It watches itself, too: a client that has no time to look at its sockets would blame the server for it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from gateway.bench.listener import Listener
from gateway.bench.outcome import Outcome, Spread
from gateway.bench.speakers import TIMEOUT_S, HttpSpeaker, Session, SocketSpeaker, Speaker, Target

PREPARE_S = 0.5
"""How long before its time a request's session is opened."""
LOOK_S = 0.010
LATE_S = 0.005
"""A client that is later than this, for one in a hundred of its duties, is too busy for what it measures."""
BUSY = 0.85
FROZEN_S = 0.050
"""Once is enough: what came meanwhile counts as late, and where it was short of, as an underrun."""


@dataclass(frozen=True)
class Request:
    number: int
    at_s: float
    text: str


@dataclass(frozen=True)
class Share:
    """One process's part of a run that begins at `begin_s` of the machine's monotonic clock: `requests` at their times, or `listeners`,
    each of whom begins at its time and is told the next of `texts` whenever the last has been heard, until `until_s`."""

    target: Target
    begin_s: float
    requests: Sequence[Request] = ()
    listeners: Sequence[Request] = ()
    texts: Sequence[str] = ()
    until_s: float = 0.0
    keep_pcm: bool = False


class Health(msgspec.Struct):
    """How a client process kept up: how late it sent, how late it woke, and its share of a core."""

    late_ms: Spread
    lag_ms: Spread
    core: float

    @property
    def was_late(self) -> bool:
        return max(self.late_ms.p99, self.lag_ms.p99) > LATE_S * 1000 or self.lag_ms.most > FROZEN_S * 1000 or self.core > BUSY


@dataclass
class Result:
    outcomes: list[Outcome]
    health: Health
    pcm: dict[int, bytes] = field(default_factory=dict)
    """By the request's number, where it was to be kept."""


@dataclass
class Progress:
    """What a process has done so far."""

    sent: int = 0
    ended: int = 0
    bad: int = 0


def poisson(rate: float, seconds: float, texts: Sequence[str], seed: int) -> list[Request]:
    """Requests as strangers make them, `rate` a second on average."""
    rng = random.Random(seed)
    requests: list[Request] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        requests.append(Request(len(requests), at_s, texts[len(requests) % len(texts)]))
        at_s += rng.expovariate(rate)
    return requests


async def warm_up(target: Target, texts: Sequence[str], at_once: int = 4) -> None:
    """A few requests that are not measured. Raises aiohttp.ClientError if none can be made."""
    share = Share(target, time.monotonic(), [Request(number, 0.1 * (number // at_once), text) for number, text in enumerate(texts)])
    result = await run_share(share)
    if not any(outcome.status == "ok" for outcome in result.outcomes):
        raise aiohttp.ClientError(result.outcomes[0].why)


async def run_share(share: Share, progress: Progress | None = None) -> Result:
    """Do it all; returns when the last answer has ended."""
    return await _Run(share, progress or Progress()).run()


class _Run:
    def __init__(self, share: Share, progress: Progress) -> None:
        self.share = share
        self.progress = progress
        self.outcomes: list[Outcome] = []
        self.pcm: dict[int, bytes] = {}
        self._late: list[float] = []
        self._lags: list[float] = []
        self._idle: list[Session] = []

    async def run(self) -> Result:
        busy_s, begun_s = time.process_time(), time.monotonic()
        # No limit: a request that waits for a connection would not be open-loop.
        connector = aiohttp.TCPConnector(limit=0)
        # Nor should one look for cookies, while its listener waits, that no server of speech has given.
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(connector=connector, cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
            watch = asyncio.create_task(self._watch())
            try:
                async with asyncio.TaskGroup() as tasks:
                    for request in self.share.requests:
                        await self._sleep_until(request.at_s - PREPARE_S)
                        tasks.create_task(self._one(http, request))
                    for listener in self.share.listeners:
                        tasks.create_task(self._listen(http, listener))
            finally:
                watch.cancel()
                for session in self._idle:
                    await session.close()
        core = (time.process_time() - busy_s) / (time.monotonic() - begun_s)
        outcomes = sorted(self.outcomes, key=lambda outcome: outcome.number)
        return Result(outcomes, Health(Spread.of(self._late), Spread.of(self._lags), core), self.pcm)

    async def _one(self, http: aiohttp.ClientSession, request: Request) -> Listener:
        """One request at its time, whatever comes of it."""
        outcome = Outcome(request.number, request.text, request.at_s, request.at_s)
        listener = self.share.target.listener(keep=self.share.keep_pcm)
        sent_s = self.share.begin_s + request.at_s
        try:
            async with asyncio.timeout(TIMEOUT_S):
                speaker = self._speaker(http)
                await speaker.prepare()
                await self._sleep_until(request.at_s)
                sent_s = time.monotonic()
                outcome.sent_s = sent_s - self.share.begin_s
                self._late.append(outcome.sent_s - request.at_s)
                self.progress.sent += 1
                await speaker.say(outcome, listener)
        except TimeoutError:
            outcome.status, outcome.why = "failed", f"not answered in full within {TIMEOUT_S:g} s"
        except aiohttp.WSServerHandshakeError as error:
            outcome.status, outcome.why = ("refused" if error.status in (429, 503) else "failed"), f"{error.status}: {error.message}"
        except (aiohttp.ClientError, ConnectionError) as error:
            outcome.status, outcome.why = "failed", f"{type(error).__name__}: {error}"
        outcome.heard(listener, sent_s, max(sent_s, listener.last_s if outcome.status == "ok" and listener.last_s else time.monotonic()))
        self.outcomes.append(outcome)
        if listener.kept is not None:
            self.pcm[request.number] = bytes(listener.kept)
        self.progress.ended += 1
        self.progress.bad += not outcome.clean
        return listener

    async def _listen(self, http: aiohttp.ClientSession, begin: Request) -> None:
        """Somebody who has the next text spoken when the last has been heard. Numbers go up by 1,000,000 a text."""
        at_s, turn = begin.at_s, 0
        while at_s < self.share.until_s:
            await self._sleep_until(at_s - PREPARE_S)
            text = self.share.texts[(begin.number + turn) % len(self.share.texts)]
            listener = await self._one(http, Request(begin.number + 1_000_000 * turn, at_s, text))
            # Who was refused tries again in a second.
            heard_s = listener.dry_s - self.share.begin_s if listener.bytes else at_s + 1.0
            at_s = max(heard_s, time.monotonic() - self.share.begin_s)
            turn += 1

    def _speaker(self, http: aiohttp.ClientSession) -> Speaker:
        if self.share.target.mode == "http":
            return HttpSpeaker(http, self.share.target)
        return SocketSpeaker(http, self.share.target, self._idle)

    async def _sleep_until(self, at_s: float) -> None:
        left_s = self.share.begin_s + at_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def _watch(self) -> None:
        """How late this process looks at what is ready."""
        while True:
            due_s = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self._lags.append(time.monotonic() - due_s)
