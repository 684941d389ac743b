"""Owner: the client a session belongs to, over all of its sockets: one at a time, and none for a while after one has broken."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from gateway.api.outbox import Lost, Outbox
from gateway.config import GatewayConfig
from gateway.events import Error, EventError, Ping, ServerEvent, SessionResumed, TextAppend, decode
from gateway.limits import Caller
from gateway.logs import SESSION
from gateway.refusal import Refusal
from gateway.session import Session
from gateway.sessions import Sessions

log = logging.getLogger(__name__)

ANSWERS_S = 1.0
"""A client whose socket is open answers a ping within this time."""


class Owner:
    """One session's. `opened` is what the session takes of its caller's allowance; it is given back when the session ends."""

    def __init__(self, session: Session, outbox: Outbox, caller: Caller, opened: ExitStack, sessions: Sessions, config: GatewayConfig) -> None:
        self.session = session
        self.token = f"{session.ident}.{secrets.token_urlsafe(24)}"
        """Whoever shows it takes the session over. The session's own token only lets listen."""
        self.over = False
        self._outbox = outbox
        self._caller = caller
        self._opened = opened
        self._sessions = sessions
        self._config = config
        self._used_s = time.monotonic()
        """When the client last said something that uses the session."""
        self._received = 0
        """The client's messages that were acted on, over all sockets."""
        self._request: web.Request | None = None
        """Of the socket that is open."""
        self._socket: web.WebSocketResponse | None = None
        self._writer: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self._claimed = False
        """Somebody is about to open a socket."""
        self._waiting: asyncio.Task[None] | None = None

    @property
    def waits(self) -> bool:
        """Whether the client has no socket."""
        return self._socket is None and not self.over

    async def claim(self, received: int | None) -> None:
        """The client comes back, having got `received` messages. `attend` or `disclaim` follows. Raises Refusal, also where it has not gone."""
        held = not self._claimed and self._socket is not None and await self._answers(self._socket)
        if held or self._claimed:
            what = "resume: this session has a socket that is open and answers; close that one first, or open another session"
            raise Refusal(409, "session_held", what, retry_after_s=1.0)
        if self.over:
            raise Refusal(404, "session_over", "resume: the session has ended meanwhile; open another")
        self._claimed = True
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        await self._let_go()
        try:
            self._outbox.check(received)
        except (Lost, ValueError) as error:
            self.disclaim()
            code = "messages_lost" if isinstance(error, Lost) else "invalid_request"
            raise Refusal(410 if isinstance(error, Lost) else 400, code, str(error)) from error

    def disclaim(self) -> None:
        """It did not come back after all."""
        self._claimed = False
        if self._waiting is None and not self.over:
            self._wait()

    async def attend(self, request: web.Request, socket: web.WebSocketResponse, first: ServerEvent | None, received: int | None = None) -> None:
        """Serve the client on this socket until it is gone. `first` is what it is told before all else, by default that it is back. A socket
        that breaks leaves the session waiting for the next one; one that is closed ends it."""
        SESSION.set(self.session.ident)
        if self.over:
            await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the session has ended meanwhile")
            return
        self._request, self._socket, self._claimed = request, socket, False
        self._outbox.back(first or SessionResumed(self.session.ident, self._received), received)
        writing = self._outbox.run(socket, lambda: _abort(request))
        writer = self._writer = asyncio.create_task(writing, name=f"write-{self.session.ident}")
        broken = False
        try:
            broken = await self._read(socket)
        except ConnectionError:
            # It had something to be answered, and went.
            broken = True
        finally:
            # aiohttp may cancel this handler while it waits: everything is told to stop first, then waited for.
            writer.cancel()
            if self._socket is socket:
                self._request = self._socket = self._writer = None
                if broken and not self._outbox.leaving.is_set() and self._config.resume_s > 0:
                    log.info("the client's socket broke (%s); waiting for it", socket.close_code)
                    self._wait()
                else:
                    await self.close()
                    log.info("closed (%s)", socket.close_code)
            await asyncio.wait([writer])
            if not writer.cancelled() and (error := writer.exception()) is not None:
                raise error

    def at_end(self, todo: Callable[[], object]) -> None:
        """Call this once the session is over."""
        self._opened.callback(todo)

    async def close(self) -> None:
        """End the session."""
        if self.over:
            return
        self.over = True
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._waiting.cancel()
        try:
            await self._sessions.close(self.session)
        finally:
            self._opened.close()

    def _wait(self) -> None:
        self._outbox.away()
        self._waiting = asyncio.create_task(self._expire(), name=f"wait-{self.session.ident}")

    async def _expire(self) -> None:
        try:
            async with asyncio.timeout(self._config.resume_s):
                await self._outbox.leaving.wait()
        except TimeoutError:
            log.info("the client did not come back within %g s", self._config.resume_s)
        await self.close()

    async def _answers(self, socket: web.WebSocketResponse) -> bool:
        """Whether there is somebody at the other end."""
        self._answered.clear()
        try:
            async with asyncio.timeout(ANSWERS_S):
                await socket.ping()
                await self._answered.wait()
        except (TimeoutError, ConnectionError):
            return False
        return True

    async def _let_go(self) -> None:
        """Drop a socket with nobody at the other end."""
        request, writer = self._request, self._writer
        self._request = self._socket = self._writer = None
        if request is not None:
            _abort(request)
        if writer is not None:
            writer.cancel()
            await asyncio.wait([writer])

    async def _read(self, socket: web.WebSocketResponse) -> bool:
        """Events until the client goes; returns whether its socket broke. Only a breach of the protocol, or a long silence, closes from our
        side (aiohttp itself refuses oversize frames)."""
        session, outbox, idle_s = self.session, self._outbox, self._config.idle_s
        self._used_s = time.monotonic()
        leaving = False
        while True:
            try:
                async with asyncio.timeout(None if leaving else max(0.0, self._used_s + idle_s - time.monotonic())):
                    message = await socket.receive()
            except TimeoutError:
                if session.speaking:
                    self._used_s = time.monotonic()
                elif time.monotonic() >= self._used_s + idle_s:
                    what = f"the session is closed: it had no text for {idle_s:g} s; open another when there is some"
                    outbox.event(Error("session_idle", what, True))
                    outbox.leave(WSCloseCode.POLICY_VIOLATION, b"idle")
                    leaving = True
                continue
            if message.type in (WSMsgType.TEXT, WSMsgType.PING, WSMsgType.PONG):
                self._answered.set()
            match message.type:
                case WSMsgType.TEXT:
                    self._received += 1
                    wrong = self.act(message.data)
                    if wrong is not None:
                        outbox.event(wrong)
                case WSMsgType.PING:
                    await socket.pong(message.data)
                case WSMsgType.BINARY:
                    await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"clients send text frames only")
                    return False
                case WSMsgType.CLOSE:
                    return False
                case WSMsgType.CLOSING | WSMsgType.CLOSED:
                    return True
                case WSMsgType.ERROR:
                    return not isinstance(message.data, WebSocketError)

    def act(self, message: str) -> Error | None:
        """Do what one message of the client says, whichever way it came; returns what is wrong with it."""
        try:
            event = decode(message)
            # The session refuses longer ones, at no cost.
            if isinstance(event, TextAppend) and len(event.text) <= self._config.max_append_chars:
                self._caller.spend(len(event.text), time.monotonic())
            self.session.handle(event)
        except EventError as error:
            return error.event()
        except Refusal as refusal:
            return Error(refusal.code, str(refusal), refusal.retryable)
        if not isinstance(event, Ping):
            self._used_s = time.monotonic()
        return None


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


class Owners:
    """All whose sessions are open, found by the tokens they were given."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}

    @property
    def waiting(self) -> int:
        """Sessions whose client has no socket just now."""
        return sum(owner.waits for owner in self._owners.values())

    def add(self, owner: Owner) -> None:
        """Known from now on, until its session is over."""
        self._owners[owner.session.ident] = owner
        owner.at_end(lambda: self._owners.pop(owner.session.ident, None))

    def find(self, token: str) -> Owner | None:
        """Whose token this is; None if it is nobody's."""
        owner = self._named_by(token)
        return owner if owner is not None and hmac.compare_digest(owner.token.encode(), token.encode()) else None

    def by_token(self, token: str) -> Owner:
        """Whose token this is. Raises Refusal."""
        if self._named_by(token) is None:
            raise Refusal(404, "session_over", "resume: there is no such session any more; open another")
        owner = self.find(token)
        if owner is None:
            what = "resume: not this session's; show `resume` of its session.created, which is not the token that listeners get"
            raise Refusal(401, "bad_resume_token", what)
        return owner

    def _named_by(self, token: str) -> Owner | None:
        """Of the session whose name a token begins with, as long as it lasts."""
        owner = self._owners.get(token.partition(".")[0])
        return None if owner is None or owner.over else owner

    async def close_all(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(owner.close() for owner in list(self._owners.values())))
