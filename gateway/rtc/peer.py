"""Peer: one WebRTC listener of one session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from gateway.media.line import OpusLine
from gateway.media.track import OpusTrack
from gateway.rtc.offer import BadOffer, Trickle, prepare, ufrags

log = logging.getLogger(__name__)


class IceRestart(Exception):
    """A trickle fragment of other ICE credentials: aiortc cannot restart ICE."""


class Peer:
    """A connection from its answer to its end. One task owns it: it closes the connection when the listener has gone, never came,
    or was sent away, and says so with `gone`."""

    def __init__(self, ident: str, line: OpusLine, connect_s: float, gone: Callable[[Peer], None]) -> None:
        self.ident = ident
        self._line = line
        self._connect_s = connect_s
        self._gone = gone
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._connected = False
        self._deadline: asyncio.Timeout | None = None
        self._over = asyncio.Event()
        self._ufrags: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._connection.add_listener("connectionstatechange", self._state_changed)

    async def answer(self, offer: str) -> str:
        """Take the listener on; returns the SDP answer with all our candidates. Raises BadOffer."""
        sdp = prepare(offer)
        self._ufrags = ufrags(offer)
        track = OpusTrack(self._line)
        track.add_listener("ended", self._over.set)
        self._connection.addTrack(track)
        # A listener never sends, whatever it offers.
        self._connection.getTransceivers()[0].direction = "sendonly"
        answered = False
        try:
            await self._connection.setRemoteDescription(RTCSessionDescription(sdp, "offer"))
            await self._connection.setLocalDescription(await self._connection.createAnswer())
            answered = True
        except Exception as error:
            # As with its parser: an offer that contradicts itself may run into any exception.
            raise BadOffer(f"the offer cannot be answered: {type(error).__name__}: {error}") from error
        finally:
            if not answered:
                track.stop()
                await self._abandon()
        # Only now, so that an offer that cannot be answered leaves the session's listener alone.
        self._line.attach(track)
        self._task = asyncio.create_task(self._live(), name=f"peer-{self.ident}")
        return self._connection.localDescription.sdp

    async def trickle(self, fragment: str) -> None:
        """Add the listener's candidates. Raises IceRestart."""
        trickle = Trickle(fragment)
        if not trickle.ufrags <= self._ufrags:
            raise IceRestart("ICE restart is not supported; send a new offer instead")
        for candidate in trickle.candidates:
            await self._connection.addIceCandidate(candidate)

    def dismiss(self) -> None:
        """Send the listener away; the connection closes soon."""
        self._over.set()

    async def close(self) -> None:
        """Send the listener away; returns when the connection is closed."""
        self.dismiss()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _abandon(self) -> None:
        """Close a connection that never got as far as an answer."""
        try:
            await self._connection.close()
        except AttributeError:
            # aiortc 1.16 stumbles over a data channel section that it had not given a transport yet; there is nothing to close then.
            log.info("listener %s: half of an offer was abandoned", self.ident, exc_info=True)

    async def _live(self) -> None:
        try:
            async with asyncio.timeout(None if self._connected else self._connect_s) as self._deadline:
                await self._over.wait()
        except TimeoutError:
            log.info("listener %s did not connect within %g s", self.ident, self._connect_s)
        finally:
            await self._connection.close()
            self._gone(self)

    def _state_changed(self) -> None:
        state = self._connection.connectionState
        if state == "connected":
            self._connected = True
            if self._deadline is not None:
                self._deadline.reschedule(None)
        elif state in ("failed", "closed"):
            self._over.set()
