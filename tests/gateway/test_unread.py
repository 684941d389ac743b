"""Clients that do not read what they asked for: little waits for them, in the end they are let go, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import yarl
from aiortc import RTCDataChannel

from gateway.keys import PEERS
from gateway.media.opus import LOOKAHEAD_SAMPLES, PACKET_SAMPLES
from gateway.rtc.channel import MOST_UNREAD_BYTES
from tests.gateway.census import differences, kill, started
from tests.gateway.clients import PATIENCE_S, Listener, Speaker, until
from tests.gateway.conftest import Client
from tests.gateway.mute_proxy import MuteProxy
from tests.gateway.stand_in import RATE, StandInEngine
from tests.gateway.ways import Place, cut, reset, transport_of

APPEND = "word " * 499
LONG = APPEND * 2
"""Five minutes of speech, 14 MB."""
UNSPEAKABLE = "…" * 400
"""It is answered at once, with the same text."""
HEARD = "The quick brown fox jumps over the lazy dog while seven wizards argue about the weather."
CREDIT_S = 4.0
SETTINGS = {"stalled_s": 4, "heartbeat_s": 6, "resume_s": 5}
"""Who listens, who reads slowly and who comes back do so in time, though this process may stand still for a while."""
MOST_HELD_KB = 60_000
"""By all of them at once. It is 20 to 28 MB: 1 to 4 MB each, but 10 MB for the file, which has to be whole."""
LETS_GO_WITHIN_S = 90.0

Unread = Callable[["World"], Awaitable[None]]


def late() -> contextlib.AbstractContextManager[None]:
    """On a machine that is busy with something else a client may have been let go before it is through with what it does."""
    return contextlib.suppress(ConnectionError)


class World:
    """A gateway in a process of its own, and clients whose kernel takes next to nothing for them."""

    def __init__(self, place: Place, engine: StandInEngine) -> None:
        self.place = place
        self.engine = engine
        self.held: list[Any] = []
        """What the clients hold on to."""
        self._count = itertools.count(1)

    async def get(self, path: str) -> Any:
        async with self.place.http.get(self.place.url + path) as response:
            return await response.json()

    def mark(self) -> str:
        """What a text begins with, to be known again."""
        return f"{next(self._count)} "

    async def stands(self, mark: str) -> bool:
        """Whether nothing more of this text is made, for nobody takes any; looks for a moment."""
        making = next(making for making in self.engine.utterances if making.text.startswith(mark))
        consumed = making.consumed
        await asyncio.sleep(0.2)
        return making.consumed == consumed and making.made - consumed >= CREDIT_S * RATE

    async def request(self, mark: str = "", **fields: object) -> aiohttp.ClientResponse:
        """A speech request whose answer nobody reads."""
        body = {"voice": "ryan", "input": mark + LONG, "response_format": "pcm"} | fields
        response: aiohttp.ClientResponse = await self.place.post("/v1/audio/speech", json=body)
        assert response.status == 200
        transport(response).pause_reading()
        self.held.append(response)
        return response

    async def listener(self, *, full: bool = False) -> Speaker:
        """A session that listens on its own socket, speaks, and stops reading in the middle. `full`: and nothing is made for it any more."""
        speaker = Speaker(await self.place.http.ws_connect(self.place.url + "/v1/speech", autoping=False))
        self.held.append(speaker)
        speaker.created = await speaker.event("session.created")
        await speaker.send("session.update", audio={"format": "pcm_s16le", "pace": "file"})
        mark = self.mark()
        await speaker.send("text.append", text=mark + APPEND)
        await speaker.send("text.append", text=APPEND)
        await speaker.event("utterance.started")
        transport_of(speaker).pause_reading()
        with late():
            while full and not await self.stands(mark):
                await speaker.socket.pong()
        return speaker


async def reads_slowly(world: World) -> int:
    """Takes so little at a time that the gateway hears nothing of it for many seconds; returns how many bytes it got, once they end."""
    url = yarl.URL(world.place.url)
    kernel = small_socket((socket.AF_INET, socket.SOCK_STREAM, 0))
    kernel.setblocking(False)
    await asyncio.get_running_loop().sock_connect(kernel, (url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=kernel, limit=1024)
    body = json.dumps({"voice": "ryan", "input": LONG, "response_format": "pcm"}).encode()
    writer.write(b"POST /v1/audio/speech HTTP/1.1\r\nHost: gateway\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    got = 0
    while data := await reader.read(1024):
        got += len(data)
        await asyncio.sleep(0.02)
    return got


async def ping(speaker: Speaker) -> None:
    """So often that the answers fill what there is room for; and until the gateway is at it."""
    with late():
        for _ in range(4000):
            await speaker.socket.ping(bytes(125))
        await asyncio.sleep(0.3)


async def takes_no_bytes(world: World) -> None:
    await world.request()


async def takes_no_events(world: World) -> None:
    await world.request(stream_format="sse")


async def takes_no_file(world: World) -> None:
    """All of it is there before the first byte leaves."""
    await world.request(stream=False, response_format="wav", input=APPEND)


async def takes_no_bytes_and_is_gone(world: World) -> None:
    mark = world.mark()
    response = await world.request(mark)
    while not await world.stands(mark):
        pass
    cut(transport(response))


async def stops_listening(world: World) -> None:
    await world.listener()


async def stops_listening_and_breaks_the_protocol(world: World) -> None:
    """It would be told why it has to go."""
    speaker = await world.listener(full=True)
    with late():
        await speaker.socket.send_bytes(b"\0\0")


async def stops_listening_and_pings(world: World) -> None:
    """It would be answered."""
    speaker = await world.listener(full=True)
    await ping(speaker)


async def stops_listening_and_comes_back(world: World) -> None:
    """While it is being answered its connection breaks."""
    speaker = await world.listener(full=True)
    await ping(speaker)
    reset(speaker)
    speaker.socket = await world.place.ws_connect(f"/v1/speech?resume={speaker.created['resume']}")
    await speaker.event("session.resumed")
    await speaker.close()


WAYS: tuple[Unread, ...] = (
    *[takes_no_bytes] * 3,
    *[takes_no_bytes_and_is_gone] * 3,
    takes_no_events,
    takes_no_file,
    *[stops_listening] * 3,
    stops_listening_and_breaks_the_protocol,
    stops_listening_and_pings,
    stops_listening_and_comes_back,
)


def transport(response: aiohttp.ClientResponse) -> asyncio.Transport:
    """A request's TCP connection."""
    assert response.connection is not None and response.connection.transport is not None
    return response.connection.transport


def small_socket(address: Any) -> socket.socket:
    made = socket.socket(address[0], address[1], address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return made


@pytest.fixture
async def world(engine: StandInEngine) -> AsyncIterator[World]:
    engine.credit_s, engine.frame_s = CREDIT_S, 0.0
    flags = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    gateway, line = await started("tests.gateway.watched", "--note-packets", "--engine", engine.endpoint, "--port", "0", *flags, until=b"http://")
    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=small_socket)
    try:
        async with aiohttp.ClientSession(connector=connector) as http:
            yield World(Place(line.split()[-1], http, MuteProxy(0)), engine)
    finally:
        await kill(gateway)


async def test_who_does_not_read_is_let_go_and_nobody_else_notices(world: World) -> None:
    speaker, listener = await world.place.call()
    listener.play()
    slowly = asyncio.create_task(reads_slowly(world))
    await speaker.say("Hello.")
    await world.get("/sent")
    before = await world.get("/census")
    already = len(world.engine.utterances)

    over = asyncio.Event()
    speaking = asyncio.create_task(say_and_read_on(speaker, over))
    begun_s = time.monotonic()
    arrived = len(listener.arrivals)
    async with asyncio.TaskGroup() as group:
        for way in WAYS:
            group.create_task(way(world), name=way.__name__)
    most_kb = 0
    for _ in range(3):
        most_kb = max(most_kb, (await world.get("/census"))["rss_kb"])
        await asyncio.sleep(0.2)
    left = differences(before, await world.get("/census"))
    while left and time.monotonic() < begun_s + LETS_GO_WITHIN_S:
        await asyncio.sleep(0.25)
        left = differences(before, await world.get("/census"))
    took_s = time.monotonic() - begun_s
    over.set()
    done = await speaking
    (sent,) = await world.get("/sent")
    gaps = [after[0] - earlier[0] for earlier, after in itertools.pairwise(sent)]
    print(f"{len(WAYS)} that do not read: +{most_kb - before['rss_kb']} KB, all let go after {took_s:.1f} s; {len(sent)} packets left for the one")
    print(f"who listens, at most {max(gaps) * 1000:.0f} ms apart")
    assert left == {}, "these are kept for who does not read"
    assert not slowly.done(), "who reads slowly was let go"
    assert most_kb - before["rss_kb"] < MOST_HELD_KB
    assert {making.cancelled for making in world.engine.utterances[already:] if len(making.text) >= len(LONG)} == {True}, "some were made whole"
    await gets(listener, arrived + packets(done["duration_ms"]))
    assert done["reason"] == "end"
    slowly.cancel()
    await listener.close()
    await speaker.close()


async def say_and_read_on(speaker: Speaker, over: asyncio.Event) -> dict[str, Any]:
    done = await speaker.say(HEARD)
    while not over.is_set():
        await speaker.send("ping")
        await speaker.event("pong")
        await asyncio.sleep(0.2)
    return done


def packets(duration_ms: int) -> int:
    """How many packets an utterance takes."""
    return -(-(duration_ms * 24 + LOOKAHEAD_SAMPLES) // PACKET_SAMPLES)


async def gets(listener: Listener, count: int) -> None:
    """So many packets of speech, which may be a moment behind the word that they have left; and no more."""
    await until(lambda: len(listener.arrivals) >= count)
    assert len(listener.arrivals) == count


def channel_of(gateway: Client, listener: Listener) -> RTCDataChannel:
    """The gateway's end of a listener's data channel."""
    peer = gateway.app[PEERS].get(listener.location.rpartition("/")[2])
    assert peer is not None and peer._channel is not None
    return peer._channel._channel


async def test_a_data_channel_that_is_not_read_holds_little(connect, listen, gateway) -> None:
    """Its listener hears everything; what it is told is left out, until it reads again."""
    speaker = await connect("webrtc")
    await speaker.send("session.update", text={"clean": False})
    listener = await listen(speaker, channel=True)
    channel = channel_of(gateway, listener)
    association = listener.connection.sctp
    receive = association._receive_data_chunk

    async def ignore(chunk: object) -> None:
        """Nothing is acknowledged."""

    association._receive_data_chunk = ignore
    most_bytes = 0
    for _ in range(300):
        await speaker.send("text.append", text=UNSPEAKABLE)
        await speaker.send("text.end")
        longest = len((await speaker.event("utterance.done"))["text"]) * 3 + 200
        most_bytes = max(most_bytes, channel.bufferedAmount)
    assert MOST_UNREAD_BYTES < most_bytes <= MOST_UNREAD_BYTES + longest
    done = await speaker.say("Still here.")
    assert done["reason"] == "end"
    await gets(listener, packets(done["duration_ms"]))
    assert channel.bufferedAmount <= MOST_UNREAD_BYTES + longest
    association._receive_data_chunk = receive
    await until(lambda: channel.bufferedAmount <= MOST_UNREAD_BYTES, 60.0)
    listener.send("ping")
    await listener.channel_event("pong")


async def test_a_data_channel_that_takes_less_than_an_event_gets_the_others(connect, gateway) -> None:
    """Its offer says how much that is."""
    speaker = await connect("webrtc")
    listener = Listener(gateway)
    offer = listener.offer

    async def short(*, channel: bool = False) -> str:
        sdp, limits = re.subn(r"(?<=a=max-message-size:)\d+", "110", await offer(channel=channel))
        assert limits == 1
        return sdp

    listener.offer = short  # type: ignore[method-assign]
    await listener.connect(speaker.created["token"], channel=True)
    done = await speaker.say("Too long by no more than a few words.")
    assert done["reason"] == "end"
    await gets(listener, packets(done["duration_ms"]))
    await speaker.say("Short.")
    assert (await listener.channel_event("utterance.done"))["text"] == "Short."
    await listener.close()


async def test_a_message_without_an_end_is_not_kept(connect, listen, gateway) -> None:
    """The listener goes; its session, and whoever listens next, do not notice."""
    speaker = await connect("webrtc")
    flooding = await listen(speaker, channel=True)
    association = flooding.connection.sctp
    association._remote_max_message_size = 0
    channel = channel_of(gateway, flooding)
    flooding.channel.send("x" * 50_000_000)
    async with asyncio.timeout(PATIENCE_S):
        await flooding.closed.wait()
    assert channel.transport._advertised_rwnd > -10_000_000
    listener = await listen(speaker)
    done = await speaker.say("Still here.")
    assert done["reason"] == "end"
    await gets(listener, packets(done["duration_ms"]))
