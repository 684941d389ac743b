"""What a session takes of the gateway's memory: `python -m tests.gateway.memory [--sessions 50]`. Not a test.

Resident memory of the gateway's process with so many sessions and without, garbage collected and freed memory given back each time
(GET /census of tests/gateway/watched.py): sessions that only have their WebSocket, then with a listener that hears silence and reports, then in
mid-speech. What the first ones leave for good, such as caches, is there before."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from typing import Any

import aiohttp

from tests.gateway.measure import GatewayCall, process

SPEAKS_S = 8.0
"""Until the engine is as far ahead as it goes, and packets are remembered for as long as they are."""


async def census(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """What the gateway holds."""
    async with http.get(f"{url}/census") as response:
        found: dict[str, Any] = await response.json()
    return found


async def emptied(http: aiohttp.ClientSession, url: str) -> int:
    """KB, once all sessions have gone."""
    for _ in range(100):
        found = await census(http, url)
        if not found["sessions"] and not found["peers"]:
            return int(found["rss_kb"])
        await asyncio.sleep(0.2)
    raise AssertionError(f"sessions stay: {found}")


async def main(count: int) -> None:
    """Open, measure, close; twice, for the first time counts what stays."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/engine"
        watched = ("tests.gateway.watched", "--engine", endpoint, "--port", "0", "--set", "max_sessions=5000", "--set", "max_caller_sessions=5000")
        async with (
            process("tests.gateway.stand_in", "--chunk-frames", "8", "--endpoint", endpoint, announces=False),
            process(*watched) as (url, pid),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            for warm in (False, True):
                before_kb = await emptied(http, url)
                calls = [GatewayCall(reports=True) for _ in range(count)]
                grown: dict[str, tuple[float, int]] = {}

                async def note(name: str, before_kb: int = before_kb, grown: dict[str, tuple[float, int]] = grown) -> None:
                    found = await census(http, url)
                    grown[name] = (found["rss_kb"] - before_kb) / count, len(os.listdir(f"/proc/{pid}/task"))

                for call in calls:
                    await call.open(http, url)
                await note("a WebSocket and no listener")
                for call in calls:
                    await call.listen(http, url)
                await asyncio.sleep(2.0)
                await note("a listener that hears silence")
                for call in calls:
                    call.speak()
                await asyncio.sleep(SPEAKS_S)
                await note("in mid-speech")
                await asyncio.gather(*(call.close() for call in calls))
                if warm:
                    print(f"gateway {before_kb / 1024:.0f} MB; of {count} sessions each, all in all:")
                    for name, (kb, threads) in grown.items():
                        print(f"  {name}: {kb:.0f} KB ({threads} threads in the process)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=50)
    asyncio.run(main(parser.parse_args().sessions))
