"""Ways in which a client leaves: each a coroutine that opens a session at a gateway, or a request, and goes. All are real sockets; what is
killed here sends no word of farewell."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from tests.gateway.clients import Listener, Speaker
from tests.gateway.mute_proxy import MuteProxy

LONG = "This is a long line that goes on for a while, so that somebody can leave in the middle of it."
SHORT = "Just a word."
CONNECT_S = 10
SILENT_S = 5
"""Set by who runs these ways: how long the gateway waits for a listener, and for a word of one."""

Way = Callable[["Place"], Awaitable[None]]


class Place:
    """One gateway, and a proxy in front of it that can go mute."""

    def __init__(self, url: str, http: aiohttp.ClientSession, proxy: MuteProxy) -> None:
        self.url = url
        self.http = http
        self.proxy = proxy

    def ws_connect(self, path: str) -> Any:
        return self.http.ws_connect(self.url + path)

    def post(self, path: str, **options: Any) -> Any:
        return self.http.post(self.url + path, **options)

    def delete(self, path: str) -> Any:
        return self.http.delete(self.url + path)

    async def speaker(self, audio: str = "webrtc", url: str | None = None) -> Speaker:
        """A session that is set up."""
        speaker = Speaker(await self.http.ws_connect((url or self.url) + "/v1/speech"))
        speaker.created = await speaker.event("session.created")
        await speaker.send("session.update", audio={"format": audio})
        await speaker.event("session.updated")
        return speaker

    async def call(self) -> tuple[Speaker, Listener]:
        """A session with a listener."""
        speaker, listener = await self.speaker(), Listener(self)  # type: ignore[arg-type]
        await listener.connect(speaker.created["token"], channel=True)
        return speaker, listener


async def append(speaker: Speaker, text: str = LONG) -> None:
    await speaker.send("text.append", text=text)
    await speaker.send("text.end")


async def speaking(speaker: Speaker) -> None:
    """In mid-speech."""
    await append(speaker)
    await speaker.event("utterance.started")
    await asyncio.sleep(random.uniform(0.1, 0.4))


def transport_of(speaker: Speaker) -> asyncio.Transport:
    """The session's TCP connection."""
    connection = speaker.socket._response.connection
    assert connection is not None and connection.transport is not None
    return connection.transport


def reset(speaker: Speaker) -> None:
    """Cut the socket."""
    cut(transport_of(speaker))


def cut(transport: asyncio.Transport) -> None:
    """The kernel sends a reset, and forgets what it had still to send."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Nowhere:
    """A UDP transport whose process is gone: nothing is sent any more."""

    def sendto(self, data: bytes, addr: tuple[str, int]) -> None:
        pass

    def close(self) -> None:
        pass


async def vanish(listener: Listener) -> None:
    """Its sockets are gone from one moment to the next, as with a process that was killed."""
    listener.stop_playing()
    for transceiver in listener.connection.getTransceivers():
        for protocol in transceiver.receiver.transport.transport._connection._protocols:
            protocol.transport.abort()
            # aiortc says farewell when it is closed, also by a transport that is closed, which asyncio does not allow.
            protocol.transport = Nowhere()
    await listener.close()


async def clean(place: Place) -> None:
    speaker = await place.speaker("pcm_s16le")
    await append(speaker, SHORT)
    await speaker.event("utterance.done")
    await speaker.close()


async def heard_out(place: Place) -> None:
    speaker, listener = await place.call()
    await append(speaker, SHORT)
    await speaker.event("utterance.done")
    await speaker.close()
    await listener.close()


async def closed_in_mid_speech(place: Place) -> None:
    speaker, listener = await place.call()
    await speaking(speaker)
    await speaker.close()
    await listener.close()


async def killed_in_mid_speech(place: Place) -> None:
    speaker, listener = await place.call()
    await speaking(speaker)
    reset(speaker)
    await vanish(listener)


async def killed_before_the_first_sound(place: Place) -> None:
    speaker = await place.speaker("pcm_s16le")
    await append(speaker)
    reset(speaker)


async def killed_while_it_cancels(place: Place) -> None:
    speaker, listener = await place.call()
    await speaking(speaker)
    await speaker.send("cancel")
    reset(speaker)
    await vanish(listener)


async def closed_while_it_cancels(place: Place) -> None:
    speaker = await place.speaker("pcm_s16le")
    await append(speaker)
    await speaker.send("cancel")
    await append(speaker)
    await speaker.send("cancel")
    await speaker.close()


async def killed_with_text_that_waits(place: Place) -> None:
    speaker = await place.speaker("pcm_s16le")
    await speaker.send("text.append", text="And")
    await asyncio.sleep(0.1)
    reset(speaker)


async def listener_deleted(place: Place) -> None:
    speaker, listener = await place.call()
    await speaking(speaker)
    async with place.delete(listener.location) as response:
        assert response.status == 200
    await asyncio.sleep(random.choice((0.0, 1.5)))
    await speaker.close()
    await listener.close()


async def listener_killed(place: Place) -> None:
    """The agent stays, at times until that is noticed."""
    speaker, listener = await place.call()
    listener.play()
    await speaking(speaker)
    await vanish(listener)
    await asyncio.sleep(random.choice((0.0, SILENT_S + 2.0)))
    await speaker.close()


async def listener_replaced(place: Place) -> None:
    speaker, first = await place.call()
    await speaking(speaker)
    second = Listener(place)  # type: ignore[arg-type]
    await second.connect(speaker.created["token"])
    await speaker.close()
    await first.close()
    await second.close()


async def _offer(place: Place, speaker: Speaker, edit: Callable[[str], str]) -> int:
    listener = Listener(place)  # type: ignore[arg-type]
    headers = {"Authorization": f"Bearer {speaker.created['token']}", "Content-Type": "application/sdp"}
    async with place.post("/v1/whep", data=edit(await listener.offer(channel=True)), headers=headers) as response:
        status: int = response.status
    await listener.connection.close()
    return status


async def listener_that_never_connects(place: Place) -> None:
    speaker = await place.speaker()
    assert await _offer(place, speaker, lambda sdp: sdp) == 201
    await append(speaker)
    await asyncio.sleep(random.choice((0.0, CONNECT_S + 1.0)))
    await speaker.close()


async def listener_without_a_way(place: Place) -> None:
    """No address of its offer can be reached."""

    def elsewhere(sdp: str) -> str:
        kept = [line for line in sdp.splitlines() if not line.startswith("a=candidate")]
        at = next(i for i, line in enumerate(kept) if line.startswith("a=ice-ufrag"))
        kept.insert(at, "a=candidate:1 1 udp 2130706431 192.0.2.1 9 typ host")
        return "\r\n".join(kept) + "\r\n"

    speaker = await place.speaker()
    assert await _offer(place, speaker, elsewhere) == 201
    await asyncio.sleep(random.choice((0.0, CONNECT_S + 1.0)))
    await speaker.close()


async def bad_offer(place: Place) -> None:
    speaker = await place.speaker()
    assert await _offer(place, speaker, lambda sdp: sdp.replace("a=fingerprint", "a=nothing")) == 400
    await speaker.close()


async def closed_while_it_offers(place: Place) -> None:
    speaker = await place.speaker()
    offer = asyncio.create_task(_offer(place, speaker, lambda sdp: sdp))
    await asyncio.sleep(random.uniform(0, 0.1))
    await speaker.close()
    assert await offer in (201, 404)


async def closed_while_it_connects(place: Place) -> None:
    """ICE or DTLS is on its way."""
    speaker, listener = await place.speaker(), Listener(place)  # type: ignore[arg-type]
    connecting = asyncio.create_task(listener.connect(speaker.created["token"], channel=True))
    await asyncio.sleep(random.uniform(0, 0.3))
    await speaker.close()
    connecting.cancel()
    await asyncio.wait([connecting])
    # aiortc's own receiver may wait for ever for a track whose connection never came about.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
            await listener.close()


async def gone_silent(place: Place) -> None:
    """Its network is gone: the connection stands, and nothing comes or goes any more."""
    speaker = await place.speaker("pcm_s16le", place.proxy.url)
    await speaking(speaker)
    place.proxy.mute(transport_of(speaker).get_extra_info("sockname")[1])
    transport_of(speaker).abort()


async def request_cut(place: Place) -> None:
    """The same over HTTP."""
    async with place.post("/v1/audio/speech", json={"input": LONG * 3, "response_format": "pcm", "pace": "live"}) as response:
        assert response.status == 200
        await response.content.readany()
        response.close()


async def handshake_cut(place: Place) -> None:
    """It goes as soon as it has asked."""
    with contextlib.suppress(aiohttp.ClientError):
        connecting = asyncio.create_task(place.http.ws_connect(place.url + "/v1/speech"))
        await asyncio.sleep(random.uniform(0, 0.01))
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await connecting)._response.close()


WAYS: tuple[Way, ...] = (
    clean,
    heard_out,
    closed_in_mid_speech,
    killed_in_mid_speech,
    killed_before_the_first_sound,
    killed_while_it_cancels,
    closed_while_it_cancels,
    killed_with_text_that_waits,
    listener_deleted,
    listener_killed,
    listener_replaced,
    listener_that_never_connects,
    listener_without_a_way,
    bad_offer,
    closed_while_it_offers,
    closed_while_it_connects,
    gone_silent,
    request_cut,
    handshake_cut,
)
