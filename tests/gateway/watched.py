"""A gateway that can be looked into: `python -m tests.gateway.watched FLAGS` takes what `vivavoce serve` takes.

GET /census: what the process holds. GET /sent: when each RTP packet left, since the last such request."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from aiohttp import web
from aiortc import RTCDtlsTransport, RTCPeerConnection
from aiortc.rtp import RtpPacket

from gateway import serve
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.keys import CALLERS, ENGINES, PEERS, SESSIONS
from gateway.pool import EnginePool
from gateway.rtc.peer import Peer
from gateway.session import Session

WATCHED = (Session, Peer, RTCPeerConnection)


def descriptors(pid: int) -> dict[str, int]:
    """A process's open files by kind: socket, pipe, anon_inode, or a path."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds[re.sub(r":\[.*", "", os.readlink(entry))] += 1
        except FileNotFoundError:
            # The one that this loop itself reads the folder with.
            continue
    return dict(kinds)


def resident_kb(pid: int) -> int:
    """Memory of a process that is in RAM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


async def census(request: web.Request) -> web.Response:
    """What is there after all garbage is gone."""
    app = request.app
    gc.collect()
    # Without this, memory that was freed in small pieces counts as held.
    ctypes.CDLL(None).malloc_trim(0)
    client = app[ENGINES]._client
    objects = Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, WATCHED))
    return web.json_response(
        {
            "tasks": Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()),
            "descriptors": descriptors(os.getpid()),
            "threads": Counter(re.sub(r"[-_]\d+.*", "", thread.name) for thread in threading.enumerate()),
            "objects": {kind.__name__: objects[kind.__name__] for kind in WATCHED},
            "sessions": app[SESSIONS].count,
            "peers": len(app[PEERS]._peers),
            "open": app[CALLERS].open,
            "utterances": len(client._utterances) + len(client._cancelled) if client is not None else 0,
            "errors": ERRORS.count,
            "rss_kb": resident_kb(os.getpid()),
        }
    )


class Errors(logging.Handler):
    """Counts what the gateway and aiohttp logged as errors. Asyncio's are aiortc's: it does not like to be closed while it connects."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """One more."""
        self.count += record.name.startswith(("gateway", "aiohttp"))


ERRORS = Errors(logging.ERROR)


class Departures:
    """Notes every RTP packet as it leaves: by transport, the moment and its RTP timestamp."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[float, int]]] = defaultdict(list)

    def install(self) -> None:
        send = RTCDtlsTransport._send_rtp

        async def noted(transport: RTCDtlsTransport, data: bytes) -> None:
            await send(transport, data)
            # RTCP reports leave by the same way.
            if not 200 <= data[1] <= 207:
                self.seen[id(transport)].append((time.monotonic(), RtpPacket.parse(data).timestamp))

        RTCDtlsTransport._send_rtp = noted

    async def show(self, request: web.Request) -> web.Response:
        """Everything since the last time, and forget it."""
        seen, self.seen = self.seen, defaultdict(list)
        return web.json_response(list(seen.values()))


def main() -> int:
    departures = Departures()

    def watched(config: GatewayConfig, engines: EnginePool) -> web.Application:
        # Not before: logging has been set up by now.
        logging.getLogger().addHandler(ERRORS)
        app = create_app(config, engines)
        app.add_routes([web.get("/census", census), web.get("/sent", departures.show)])
        return app

    serve.create_app = watched
    arguments: list[Any] = sys.argv[1:]
    if "--note-packets" in arguments:
        arguments.remove("--note-packets")
        departures.install()
    return serve.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
