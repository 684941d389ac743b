"""Several client processes, where one would be the bottleneck: each takes its share of a run, all begin at one moment."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

import uvloop

from gateway.bench.load import PREPARE_S, Progress, Result, Share, run_share

START_S = PREPARE_S + 0.2
"""From the moment when all processes are up to the beginning of a run."""
STREAMS_EACH = 100
"""Streams that one client process listens to with time to spare."""
TELL_S = 0.2


def processes(streams: float) -> int:
    """How many client processes so many streams at once should have; one core is left to whatever else there is."""
    return max(1, min(round(streams / STREAMS_EACH + 0.5), (os.cpu_count() or 2) - 1))


def deal(share: Share, count: int) -> list[Share]:
    """A run's requests or listeners in turn to `count` processes."""
    return [replace(share, requests=share.requests[n::count], listeners=share.listeners[n::count]) for n in range(count)]


def run(share: Share, count: int, bar: Callable[[Progress], None]) -> list[Result]:
    """The results of each process. Raises RuntimeError if one of them breaks."""
    context = multiprocessing.get_context("spawn")
    crew = []
    for part in deal(share, count):
        told = [context.Value("i", 0) for _ in Progress.__dataclass_fields__]
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(part, told, there), daemon=True)
        process.start()
        # So that its end is seen here when it breaks.
        there.close()
        crew.append((process, told, here))
    results: list[Result] = []
    try:
        for _, _, here in crew:
            here.recv()
        begin_s = time.monotonic() + START_S
        for _, _, here in crew:
            here.send(begin_s)
        for _, _, here in crew:
            while not here.poll(TELL_S):
                bar(Progress(*(sum(told[field].value for _, told, _ in crew) for field in range(3))))
            results.append(here.recv())
    except EOFError:
        raise RuntimeError("a client process broke; its message is above") from None
    finally:
        for process, _, _ in crew:
            process.terminate()
            process.join()
    return results


def _work(share: Share, told: Sequence[Synchronized[int]], there: Connection) -> None:
    """A client process."""

    async def work() -> Result:
        progress = Progress()
        running = asyncio.create_task(run_share(share, progress))
        while not running.done():
            await asyncio.wait([running], timeout=TELL_S)
            for value, field in zip(told, ("sent", "ended", "bad"), strict=True):
                value.value = getattr(progress, field)
        return running.result()

    there.send("ready")
    share = replace(share, begin_s=there.recv())
    there.send(uvloop.run(work()))
