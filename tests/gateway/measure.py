"""What the gateway costs: `python -m tests.gateway.measure [--calls 10 50] [--stock] [--embedded]`. Not a test.

Gateway and engine run in processes of their own; the listeners here (tests/gateway/stamped.py) count packets and do not decode them. The
engine is the stand-in, with chunks of eight frames once a listener has some in hand, as the real one; or with --embedded that one, with
one thread and the embedded voice. With --stock the same listeners then call
a plain aiortc server (tests/gateway/stock.py) that encodes by itself. All calls speak all the time, one utterance after the other."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import numpy as np

from tests.gateway.cost import LIMITS, cpu_s
from tests.gateway.stamped import PACKET_S, StampedListener, post_offer

FIRST = {False: "Hello.", True: "The meeting starts at seven."}
TEXT = "The quick brown fox jumps over the lazy dog while seven wizards argue about the weather, and she sells sea shells on the sea shore."
FIRSTS = 60
SETTLES_S = 3.0
LIMIT_MS = 10.0
LEAST_CAME = 0.99
"""The gateway leaves out what a listener has run dry waiting for: then packets are missing and few are late."""
QUIET_CORES = 0.15
"""What other work may use of the machine while lateness is measured: a packet that has to wait for a core is late by milliseconds."""


def busy_s() -> float:
    """CPU seconds of the whole machine so far, and what its host took from it."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")


class Call(Protocol):
    """What is measured many at a time."""

    listener: StampedListener

    async def connect(self, http: aiohttp.ClientSession, url: str) -> None:
        """Until packets can come."""

    def speak(self) -> None:
        """Without an end from now on."""

    async def close(self) -> None:
        """Leave."""


class GatewayCall:
    """A session and its listener."""

    def __init__(self, reports: bool = False) -> None:
        self.listener = StampedListener(reports=reports)
        self._talking: asyncio.Task[None] | None = None

    async def connect(self, http: aiohttp.ClientSession, url: str) -> None:
        """See Call."""
        await self.open(http, url)
        await self.listen(http, url)

    async def open(self, http: aiohttp.ClientSession, url: str) -> None:
        """The session alone."""
        self._socket = await http.ws_connect(f"{url}/v1/speech")
        self._token = (await self._socket.receive_json())["token"]
        await self._socket.send_json({"type": "session.update", "audio": {"format": "webrtc"}})
        await self._socket.receive_json()

    async def listen(self, http: aiohttp.ClientSession, url: str) -> None:
        """Its listener, until packets can come."""
        await self.listener.connect(lambda sdp: post_offer(http, url, sdp, self._token))

    async def say(self, text: str) -> tuple[float, float]:
        """Text to first packet of sound at the socket here, and the gateway's own ttfa: seconds."""
        before, begun_s = len(self.listener.arrivals), time.time()
        await self._append(text)
        while (event := await self._socket.receive_json())["type"] != "utterance.done":
            if event["type"] == "utterance.started":
                ttfa_s = event["ttfa_ms"] / 1000
        return next(arrival.at_s for arrival in self.listener.arrivals[before:] if arrival.speech) - begun_s, ttfa_s

    def speak(self) -> None:
        """See Call. Calls begin their utterances at different times."""
        self._talking = asyncio.create_task(self._talk(TEXT[: random.randrange(20, len(TEXT))]))

    async def close(self) -> None:
        """See Call."""
        if self._talking is not None:
            self._talking.cancel()
        await self.listener.close()
        await self._socket.close()

    async def _append(self, text: str) -> None:
        await self._socket.send_json({"type": "text.append", "text": text})
        await self._socket.send_json({"type": "text.end"})

    async def _talk(self, text: str) -> None:
        await self._append(text)
        await self._append(TEXT)
        async for message in self._socket:
            if "utterance.done" in message.data:
                await self._append(TEXT)


class StockCall:
    """A listener of the plain server, which speaks to everybody from the start."""

    def __init__(self) -> None:
        self.listener = StampedListener()

    async def connect(self, http: aiohttp.ClientSession, url: str) -> None:
        """See Call."""
        await self.listener.connect(lambda sdp: post_offer(http, url, sdp))

    def speak(self) -> None:
        """See Call."""

    async def close(self) -> None:
        """See Call."""
        await self.listener.close()


@dataclass
class Server:
    """What is called, and the processes it consists of."""

    name: str
    url: str
    pids: Mapping[str, int]
    call: Any
    """Makes a Call."""


async def crowds(http: aiohttp.ClientSession, server: Server, counts: Sequence[int], seconds: float, tries: int) -> None:
    """Print what so many calls at once get and cost, again while other work disturbs it; give up where two numbers of calls were too many."""
    calls: list[Call] = []
    too_many, best = 0, 0
    for count in sorted(counts):
        before_s, had = cpu_s([server.pids[server.name]]), len(calls)
        while len(calls) < count:
            calls.append(server.call())
            await calls[-1].connect(http, server.url)
        setup_ms = (cpu_s([server.pids[server.name]]) - before_s) / (count - had) * 1000
        for call in calls[had:]:
            call.speak()
        await asyncio.sleep(SETTLES_S)
        for _ in range(tries):
            good, quiet = await crowd(server, calls, seconds, setup_ms)
            if quiet:
                break
        best = count if good else best
        too_many += not good
        if too_many == 2:
            break
    print(f"{server.name}: most calls of these with p99 lateness under {LIMIT_MS:g} ms: {best}", flush=True)
    await asyncio.gather(*(call.close() for call in calls))


async def crowd(server: Server, calls: Sequence[Call], seconds: float, setup_ms: float) -> tuple[bool, bool]:
    """Measure for so long: whether packets came, and in time, and whether the machine did little else."""
    pids = {**server.pids, "client": os.getpid()}
    for call in calls:
        call.listener.arrivals.clear()
    before_s, all_before_s, from_s = {name: cpu_s([pid]) for name, pid in pids.items()}, busy_s(), time.time()
    await asyncio.sleep(seconds)
    to_s = time.time()
    used = {name: (cpu_s([pid]) - before_s[name]) / (to_s - from_s) for name, pid in pids.items()}
    used["others"] = max(0.0, (busy_s() - all_before_s) / (to_s - from_s) - sum(used.values()))
    arrivals = [arrival for call in calls for arrival in call.listener.arrivals]
    late = np.array([late_s for call in calls for late_s in call.listener.lateness_s(from_s, to_s)]) * 1000
    p50, p99 = np.percentile(late, [50, 99])
    came = len(arrivals) * PACKET_S / (to_s - from_s) / len(calls)
    speech = sum(arrival.speech for arrival in arrivals) / len(arrivals)
    read_ms = np.percentile([arrival.read_s for arrival in arrivals], 99) * 1000
    print(
        f"{server.name}, {len(calls)} calls: packets late p50 {p50:.1f} p99 {p99:.1f} max {late.max():.1f} ms; "
        f"{came * 100:.1f} % of packets came, {speech * 100:.0f} % of them speech; "
        f"{used[server.name] / len(calls) * 1000:.1f} ms CPU a call-second, {setup_ms:.0f} to set one up; "
        f"cores used: {', '.join(f'{name} {cores:.2f}' for name, cores in used.items())}; "
        f"this client reads p99 {read_ms:.1f} ms late; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return p99 < LIMIT_MS and came >= LEAST_CAME, used["others"] < QUIET_CORES


async def first_sound(http: aiohttp.ClientSession, server: Server, text: str) -> None:
    """Print how soon one call hears what it says, and what it costs to keep it."""
    call = GatewayCall()
    await call.connect(http, server.url)
    firsts, ttfas = [], []
    for _ in range(FIRSTS):
        # At any moment between two packets of the silence that runs on.
        await asyncio.sleep(random.uniform(0.05, 0.1))
        first_s, ttfa_s = await call.say(text)
        firsts.append(first_s)
        ttfas.append(ttfa_s)
    for name, values in (("text sent to first packet here", firsts), ("ttfa_ms as the gateway says", ttfas)):
        print(f"{name}: p50 {np.percentile(values, 50) * 1000:.1f} ms, p95 {np.percentile(values, 95) * 1000:.1f} ms, n {len(values)}", flush=True)
    await call.close()


async def awake(http: aiohttp.ClientSession, server: Server, count: int, seconds: float, reports: bool) -> None:
    """Print what listeners cost who have been connected and hear silence."""
    calls = [GatewayCall(reports) for _ in range(count)]
    for call in calls:
        await call.connect(http, server.url)
    # A listener that reports is not sent comfort noise at once.
    await asyncio.sleep(2 * SETTLES_S)
    before_s = cpu_s([server.pids[server.name]])
    await asyncio.sleep(seconds)
    used_s = cpu_s([server.pids[server.name]]) - before_s
    print(f"{count} calls that hear silence: {used_s / seconds / count * 1000:.1f} ms CPU a call-second", flush=True)
    await asyncio.gather(*(call.close() for call in calls))


@asynccontextmanager
async def process(*command: str, announces: bool = True) -> AsyncIterator[tuple[str, int]]:
    """A Python module as a process: the address that it prints, and its number."""
    out = asyncio.subprocess.PIPE if announces else None
    started = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stdout=out, stderr=asyncio.subprocess.DEVNULL)
    try:
        line = (await started.stdout.readline()).decode() if started.stdout is not None else "-"
        assert line, f"{command[0]} ended"
        yield line.split()[-1], started.pid
    finally:
        started.terminate()
        await started.wait()


async def main(arguments: argparse.Namespace) -> None:
    """All of it, one after the other."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        endpoint = f"ipc://{stack.enter_context(tempfile.TemporaryDirectory())}/engine"
        engine = ("engine", "serve", "--threads", "1") if arguments.embedded else ("tests.gateway.stand_in", "--chunk-frames", "8")
        limits = [word for limit in (*LIMITS, *arguments.set) for word in ("--set", limit)]
        async with (
            process(*engine, "--endpoint", endpoint, announces=False) as (_, engine_pid),
            process("gateway", "serve", "--engine", endpoint, "--port", "0", *limits) as (url, pid),
        ):
            gateway = Server("gateway", url, {"gateway": pid, "engine": engine_pid}, lambda: GatewayCall(arguments.reports))
            if not arguments.only_calls:
                await first_sound(http, gateway, FIRST[arguments.embedded])
                await awake(http, gateway, 10, 5.0, arguments.reports)
            await crowds(http, gateway, arguments.calls, arguments.seconds, arguments.tries)
        if arguments.stock:
            async with process("tests.gateway.stock", "--rate", str(arguments.stock)) as (url, pid):
                await crowds(http, Server("stock", url, {"stock": pid}, StockCall), arguments.calls, arguments.seconds, arguments.tries)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--seconds", type=float, default=10.0, help="to measure each number of calls for")
    parser.add_argument("--tries", type=int, default=6, help="as many times, at most, while other work uses the machine")
    parser.add_argument("--stock", type=int, nargs="?", const=24000, metavar="RATE", help="plain aiortc too, fed with frames of this rate")
    parser.add_argument("--embedded", action="store_true", help="the real engine with the embedded voice")
    parser.add_argument("--reports", action="store_true", help="listeners report what they play, five times a second, and get events, as browsers")
    parser.add_argument("--only-calls", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the gateway")
    asyncio.run(main(parser.parse_args()))
