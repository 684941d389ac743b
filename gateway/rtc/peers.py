"""Peers: the WebRTC listeners there are now."""

from __future__ import annotations

import asyncio
import secrets

from gateway.config import GatewayConfig
from gateway.rtc.channel import Act
from gateway.rtc.peer import Peer
from gateway.session import Session
from gateway.sessions import NoSuchSession


class Occupied(Exception):
    """The session has a listener, and takes no other."""


class Peers:
    """Listeners by their WHEP identifier, at most one a session: a second one replaces the first, or is refused."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._peers: dict[str, Peer] = {}

    async def add(
        self,
        session: Session,
        offer: str,
        most_s: float | None = None,
        former: str | None = None,
        played_to: int | None = None,
        act: Act | None = None,
    ) -> tuple[Peer, str]:
        """A new listener for `session`, which can be told to hold up to `most_s` of sound: itself and its SDP answer. `former`: its identifier
        on a connection that it has lost, and `played_to` the RTP timestamp that it played last there. `act`: see Peer. Raises BadOffer
        or Occupied, which leave the old listener alone, or NoSuchSession."""
        same = session.listener is not None and session.listener.ident == former
        if session.refuses_listeners and session.media.attached and not same:
            raise Occupied("the session has a listener and was told to refuse others (listeners: refuse); wait until that one has gone")
        if session.listener is not None and same and played_to is not None:
            session.listener.played_to(played_to)
        peer = Peer(secrets.token_urlsafe(12), session.media, self._config, self._gone, act)
        answer = await peer.answer(offer, most_s)
        self._peers[peer.ident] = peer
        if session.closed:
            await peer.close()
            raise NoSuchSession("the session ended meanwhile")
        old, session.listener = session.listener, peer
        if old is not None:
            old.dismiss()
        return peer, answer

    def get(self, ident: str) -> Peer | None:
        """The listener with this identifier."""
        return self._peers.get(ident)

    async def close_all(self) -> None:
        """Send all listeners away."""
        await asyncio.gather(*(peer.close() for peer in list(self._peers.values())))

    def _gone(self, peer: Peer) -> None:
        self._peers.pop(peer.ident, None)
