"""Peer: one WebRTC listener of one session."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime

from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.rtcrtpparameters import RTCRtpSendParameters

from gateway.config import GatewayConfig
from gateway.events import Hold, ServerEvent, Stats
from gateway.media.line import OpusLine
from gateway.media.pacer import LEAD_S, TRANSIT_S, lead_for
from gateway.media.reserve import Reserve
from gateway.media.track import OpusTrack
from gateway.rtc.channel import LABEL, Act, Channel
from gateway.rtc.feedback import Feedback
from gateway.rtc.offer import BadOffer, Trickle, prepare, ufrags

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
USUAL_TARGET_S = LEAD_S + TRANSIT_S
"""What receivers hold that cannot be told how much."""


class _Forgotten(dict[int, object]):
    """In place of the last 128 packets, which aiortc keeps of each listener to send them again. Nobody can ask for that, for its audio has no
    NACK; and objects that live for seconds make a pass of the garbage collector long."""

    def __setitem__(self, number: int, packet: object) -> None:
        pass


class IceRestart(Exception):
    """A trickle fragment of other ICE credentials: aiortc cannot restart ICE."""


class Peer:
    """A connection from its answer to its end. One task owns it: it closes the connection when the listener has gone, never came,
    or was sent away, and says so with `gone`. `act` does what the session's owner says on its data channel, if that is who listens."""

    def __init__(self, ident: str, line: OpusLine, config: GatewayConfig, gone: Callable[[Peer], None], act: Act | None = None) -> None:
        self.ident = ident
        self._act = act
        self.feedback = Feedback(line.playout)
        self.target_s = USUAL_TARGET_S
        """How much sound the listener is to hold; it is sent as far ahead, from the first packet to the last."""
        self._line = line
        self._config = config
        self._gone = gone
        self._track: OpusTrack | None = None
        self._sender: RTCRtpSender | None = None
        self._channel: Channel | None = None
        self._sign_s = 0.0
        """When the listener last gave a sign of life."""
        self._receiver_report: datetime | None = None
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._connected = False
        self._over = asyncio.Event()
        self._closing = False
        self._ufrags: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._connection.add_listener("connectionstatechange", self._state_changed)
        self._connection.add_listener("datachannel", self._open_channel)

    @property
    def owns(self) -> bool:
        """Whether it is the session's owner who listens."""
        return self._act is not None

    async def answer(self, offer: str, most_s: float | None = None) -> str:
        """Take the listener on; returns the SDP answer with all our candidates. `most_s`: how much sound it can be told to hold, if it
        can. Raises BadOffer."""
        sdp = prepare(offer)
        self._ufrags = ufrags(offer)
        if most_s is not None:
            self.target_s = min(self._config.client_lead_s, most_s)
        reserve = Reserve(self._config.quiet_lead_s, self.target_s, self._tell_target, can_hold=most_s is not None)
        track = self._track = OpusTrack(self._line, reserve, lead_for(self.target_s))
        track.add_listener("ended", self._over.set)
        sender = self._sender = self._connection.addTrack(track)
        # aiortc has no name for it that is public; the pinned version keeps it for its sender reports.
        track.wire_time = lambda: int(sender._RTCRtpSender__rtp_timestamp)  # type: ignore[attr-defined]
        sender._RTCRtpSender__rtp_history = _Forgotten()  # type: ignore[attr-defined]
        send = sender.send

        async def send_unless_closing(parameters: RTCRtpSendParameters) -> None:
            # aiortc goes on connecting while it is closed. A sender that it starts then is never stopped, and reports for ever; so its
            # connecting ends here.
            if self._closing:
                raise asyncio.CancelledError
            await send(parameters)

        sender.send = send_unless_closing  # type: ignore[method-assign]
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

    def played_to(self, timestamp: int) -> None:
        """It says, now that it is back, which packet it played last: the RTP timestamp on the wire."""
        rtp_time = None if self._track is None else self._track.from_wire(timestamp)
        if rtp_time is not None:
            self._line.playout.played_to(rtp_time, time.monotonic())

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
        self._closing = True
        try:
            await self._connection.close()
        except AttributeError:
            # aiortc 1.16 stumbles over a data channel section that it had not given a transport yet; there is nothing to close then.
            log.info("listener %s: half of an offer was abandoned", self.ident, exc_info=True)

    def event(self, event: ServerEvent) -> None:
        """Tell the listener, if it has a data channel."""
        if self._channel is not None:
            self._channel.event(event)

    async def _live(self) -> None:
        deadline_s = time.monotonic() + self._config.connect_s
        try:
            while not await self._over_within(LOOK_EVERY_S if self._connected else min(LOOK_EVERY_S, deadline_s - time.monotonic())):
                now_s = time.monotonic()
                if not self._connected and now_s >= deadline_s:
                    log.info("listener %s did not connect within %g s", self.ident, self._config.connect_s)
                    break
                if self._connected and await self._silent_for(now_s) >= self._config.silent_s:
                    log.info("listener %s has gone: nothing came from it for %g s", self.ident, self._config.silent_s)
                    break
                if self._overflows:
                    log.warning("listener %s is sent away: it sends messages without an end", self.ident)
                    break
        finally:
            self._closing = True
            await self._connection.close()
            self._gone(self)

    async def _over_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    async def _silent_for(self, now_s: float) -> float:
        """Seconds without a sign of life, from a listener that should have given one: who is sent nothing may keep silent."""
        assert self._sender is not None
        stats = await self._sender.getStats()
        report = next((entry.timestamp for entry in stats.values() if entry.type == "remote-inbound-rtp"), None)
        if report != self._receiver_report or not self._line.awake(now_s):
            self._receiver_report, self._sign_s = report, now_s
        return now_s - self._sign_s

    @property
    def _overflows(self) -> bool:
        """Whether more has come on its data channels, of messages that are not complete, than it was told there is room for. aiortc keeps
        all of it."""
        association = self._connection.sctp
        return association is not None and association._advertised_rwnd < 0

    def _open_channel(self, channel: RTCDataChannel) -> None:
        if channel.label == LABEL and self._channel is None:
            self._channel = Channel(channel, self._report, self._act)
        else:
            channel.close()

    def _report(self, stats: Stats, now_s: float) -> None:
        if self._track is None or not self._line.serves(self._track):
            return
        self._sign_s = now_s
        rtp_time = None if stats.rtp_time is None else self._track.from_wire(stats.rtp_time)
        refusal = self.feedback.take(stats, rtp_time, now_s)
        self._line.pause(self._track, self.feedback.pause)
        if refusal is None and self.feedback.pause is None:
            target_s = None if stats.target_ms is None else stats.target_ms / 1000
            network_s = None if stats.network_ms is None else stats.network_ms / 1000
            self._track.report(target_s, stats.buffer_ms / 1000, network_s, now_s, stood_s=stats.stood_ms / 1000, transit_s=self.feedback.transit_s)

    def _tell_target(self, target_s: float) -> None:
        self.event(Hold(round(target_s * 1000)))

    def _state_changed(self) -> None:
        state = self._connection.connectionState
        if state == "connected":
            self._connected, self._sign_s = True, time.monotonic()
        elif state in ("failed", "closed"):
            self._over.set()
