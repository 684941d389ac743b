"""Clients to be killed: `python -m tests.gateway.crowd URL COUNT` opens so many sessions, each with a listener, speaks in all of them, says
`speaking` and goes on for ever."""

from __future__ import annotations

import asyncio
import sys

import aiohttp

from tests.gateway.mute_proxy import MuteProxy
from tests.gateway.ways import Place, speaking


async def main(url: str, count: int) -> None:
    async with aiohttp.ClientSession() as http:
        place = Place(url, http, MuteProxy(0))
        calls = await asyncio.gather(*(place.call() for _ in range(count)))
        await asyncio.gather(*(speaking(speaker) for speaker, _ in calls))
        print("speaking", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
