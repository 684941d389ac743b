"""A network between client and gateway that can go."""

from __future__ import annotations

import asyncio
import contextlib


class MuteProxy:
    """A TCP proxy. `async with MuteProxy(port) as proxy:`; after `mute` a connection carries nothing any more in either direction, and stays
    open: as if the network between were gone."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._mute: dict[int, asyncio.Event] = {}
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def mute(self, client_port: int) -> None:
        """The connection that comes from this port."""
        self._mute[client_port].set()

    async def __aenter__(self) -> MuteProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += (writer, server_writer)
        mute = self._mute[writer.get_extra_info("peername")[1]] = asyncio.Event()
        self._tasks.add(asyncio.create_task(self._carry(reader, server_writer, mute)))
        self._tasks.add(asyncio.create_task(self._carry(server_reader, writer, mute)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, mute: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(4096):
                if mute.is_set():
                    # Both ends stay open, and this one reads no more.
                    await asyncio.Event().wait()
                sink.write(data)
                await sink.drain()
