"""A gateway behind a rough network, without the kernel's help: `python -m tests.browser.rough 30,0.02 serve ...` delays each packet of
sound by up to 30 ms more than others, in order, and loses 2 % of them; `,0.06` behind that: and lets none pass for 60 ms, every two seconds or
so; `,0.05` behind that: and all that comes and goes by UDP is under way for 50 ms."""

from __future__ import annotations

import asyncio
import random
import sys

from aioice import Connection
from aioice.ice import StunProtocol

from gateway.__main__ import main

STALL_EVERY_S = 2.0


class Rough:
    """The way between one gateway and its listeners."""

    def __init__(self, jitter_s: float, loss: float, stall_s: float, delay_s: float) -> None:
        self._jitter_s, self._loss, self._stall_s, self._delay_s = jitter_s, loss, stall_s, delay_s
        self._last_s = self._stalled_until_s = self._next_stall_s = 0.0
        self._random = random.Random(1)
        self._send, self._received = Connection.send, StunProtocol.datagram_received
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, connection: Connection, data: bytes) -> None:
        """In place of the connection's own."""
        if not 128 <= data[0] < 192 or 192 <= data[1] <= 223:
            if not self._delay_s:
                return await self._send(connection, data)
            asyncio.get_running_loop().call_later(self._delay_s, self._pass_on, connection, data)
            return
        if self._random.random() < self._loss:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._stall_s and now_s >= self._next_stall_s:
            self._stalled_until_s = now_s + self._stall_s
            self._next_stall_s = now_s + self._random.uniform(0.5, 1.5) * STALL_EVERY_S
        self._last_s = max(now_s + self._random.random() * self._jitter_s, self._last_s, self._stalled_until_s)
        loop.call_at(self._last_s + self._delay_s, self._pass_on, connection, data)

    def received(self, protocol: StunProtocol, data: bytes, addr: tuple[str, int]) -> None:
        """In place of the protocol's own."""
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._received, protocol, data, addr)
        else:
            self._received(protocol, data, addr)

    def _pass_on(self, connection: Connection, data: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._passed_on(connection, data))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _passed_on(self, connection: Connection, data: bytes) -> None:
        try:
            await self._send(connection, data)
        except ConnectionError:
            # The listener has gone meanwhile.
            return


if __name__ == "__main__":
    jitter_ms, loss, stall_s, delay_s, *_ = (*(float(word) for word in sys.argv.pop(1).split(",")), 0.0, 0.0)
    rough = Rough(jitter_ms / 1000, loss, stall_s, delay_s)
    Connection.send = lambda connection, data: rough.send(connection, data)
    StunProtocol.datagram_received = lambda protocol, data, addr: rough.received(protocol, data, addr)
    main()
