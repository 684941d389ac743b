"""Sessions: those that are open now, found by their listen token."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from concurrent.futures import ThreadPoolExecutor

from gateway.config import GatewayConfig
from gateway.pool import EnginePool
from gateway.session import Session, Socket


class NoSuchSession(Exception):
    """The token is well formed, but its session is over."""


class BadToken(Exception):
    """No token, or not one of ours."""


class Sessions:
    """All open sessions, and the encoder threads they share."""

    def __init__(self, config: GatewayConfig, engines: EnginePool) -> None:
        self._config = config
        self._engines = engines
        self._encoders = ThreadPoolExecutor(config.encoder_threads, thread_name_prefix="opus")
        self._open: dict[str, Session] = {}
        self._underruns = self._stalls = 0
        """Of sessions that are over."""

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    @property
    def listeners(self) -> int:
        """How many have a WebRTC listener attached."""
        return sum(session.media.attached for session in self._open.values())

    @property
    def underruns(self) -> int:
        """How often a listener has run dry because the engine was late."""
        return self._underruns + sum(session.media.underruns for session in self._open.values())

    @property
    def stalls(self) -> int:
        """How often a listener has run dry because this process was late."""
        return self._stalls + sum(session.media.stalls for session in self._open.values())

    @property
    def full(self) -> bool:
        """Whether another one would exceed the limit."""
        return len(self._open) >= self._config.max_sessions

    def open(self, socket: Socket) -> Session:
        """A new session that answers on `socket`; the caller ends it with `close`."""
        ident = secrets.token_urlsafe(9)
        session = Session(ident, f"{ident}.{secrets.token_urlsafe(24)}", self._config, self._engines, socket, self._encoders)
        self._open[ident] = session
        return session

    def by_token(self, token: str | None) -> Session:
        """The session this listen token belongs to. Raises BadToken or NoSuchSession."""
        ident, dot, secret = (token or "").partition(".")
        if not (ident and dot and secret):
            raise BadToken("a listen token is needed: Authorization: Bearer TOKEN, or ?token=TOKEN")
        session = self._open.get(ident)
        if session is None:
            raise NoSuchSession("the session of this token is over")
        if not hmac.compare_digest(session.token.encode(), (token or "").encode()):
            raise BadToken("this listen token is not valid")
        return session

    async def close(self, session: Session) -> None:
        """End one session."""
        if self._open.pop(session.ident, None) is not None:
            self._underruns += session.media.underruns
            self._stalls += session.media.stalls
        await session.close()

    def hang_up(self) -> None:
        """Ask all clients to go; their sessions end as their sockets close."""
        for session in self._open.values():
            session.hang_up()

    def hang_up_silent(self, now_s: float) -> None:
        """Ask those clients to go that have nothing to wait for. What nobody is there to hear is not waited for, either."""
        for session in self._open.values():
            session.end_unheard(now_s)
            if session.silent(now_s):
                session.hang_up()

    async def close_all(self) -> None:
        """End all sessions and the encoder threads."""
        await asyncio.gather(*(self.close(session) for session in list(self._open.values())))
        self._encoders.shutdown(wait=True, cancel_futures=True)
