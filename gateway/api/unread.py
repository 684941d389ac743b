"""Unread: connections whose clients do not take what is sent to them.

A client that is slow only slows what is made for it. One that takes nothing at all would hold it for ever, and its place with it: a write
waits for as long as the socket is full, and a transport that was closed for as long as something of it is left. So somebody looks, and
cuts it off."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from dataclasses import dataclass

from aiohttp import web

log = logging.getLogger(__name__)

LOOKS = 8
"""In the time that a client has."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""For SO_LINGER: what the kernel has of it goes as well."""


@dataclass
class _Rest:
    """What was left for a client to take when it was looked at last, and since when that has not become less."""

    left: int
    since_s: float


class Unread:
    """All of one gateway's. A client that takes nothing of what there is for it for `stalled_s` has its connection cut."""

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._rests: dict[asyncio.Transport, _Rest | None] = {}
        """None: it has taken everything."""
        self._look: asyncio.TimerHandle | None = None

    async def watch(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before any answer leaves, a WebSocket's too: look at its connection from now on, until that is gone."""
        if request.transport is not None:
            self._rests.setdefault(request.transport, None)
            if self._look is None:
                self._look_soon()

    def _look_soon(self) -> None:
        self._look = asyncio.get_running_loop().call_later(self._stalled_s / LOOKS, self._look_around)

    def _look_around(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for transport, before in list(self._rests.items()):
            left = _left(transport)
            if left:
                if before is None or left < before.left:
                    self._rests[transport] = _Rest(left, now_s)
                elif now_s - before.since_s >= self._stalled_s:
                    log.info("a client takes nothing any more; its connection is cut with %d bytes in it", left)
                    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                    transport.abort()
                    del self._rests[transport]
            elif transport.is_closing():
                del self._rests[transport]
            else:
                self._rests[transport] = None
        self._look = None
        if self._rests:
            self._look_soon()


def _left(transport: asyncio.Transport) -> int:
    """Bytes that a client has not taken, the kernel's too; 0 unless there are more than the kernel takes."""
    waiting = transport.get_write_buffer_size()
    if not waiting:
        return 0
    # The kernel asks for more only once a third of its room is free. A client that plays Opus as it reads takes minutes to make that much.
    with contextlib.suppress(OSError):
        (unsent,) = struct.unpack("i", fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4)))
        return waiting + int(unsent)
    return waiting
