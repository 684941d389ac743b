"""WHEP: a listener posts its offer with the session's listen token and gets the answer. With the session's resume token it is the owner, who
may say on its data channel what it may say by WebSocket.

One listener a session: a second one replaces the first, or is refused if the session says so. No ICE restart, so no ETag. The answer
carries all our candidates."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.keys import CONFIG, OWNERS, PEERS, SESSIONS
from gateway.logs import SESSION
from gateway.rtc.offer import BadOffer
from gateway.rtc.peer import IceRestart, Peer
from gateway.rtc.peers import Occupied
from gateway.rtc.turn import ice_servers
from gateway.session import Session
from gateway.sessions import BadToken, NoSuchSession

SDP = "application/sdp"
TRICKLE = "application/trickle-ice-sdpfrag"
MOST_TARGET = "Vivavoce-Max-Target-Ms"
"""On an offer: the jitterBufferTarget that the listener can be given at most, in milliseconds."""
TARGET = "Vivavoce-Target-Ms"
"""On an answer: the one it is to be given before the first packet comes. Sound is sent as far ahead."""
FORMER = "Vivavoce-Former-Listener"
"""On an offer: the listener's identifier (the end of its Location) on a connection that it has lost."""
PLAYED = "Vivavoce-Played-Rtp-Time"
"""On an offer: the RTP timestamp that it played last on that connection. It goes on behind it."""
CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "OPTIONS, POST, PATCH, DELETE",
    "Access-Control-Allow-Headers": f"Authorization, Content-Type, If-Match, {MOST_TARGET}, {FORMER}, {PLAYED}",
    "Access-Control-Expose-Headers": f"Location, Link, ETag, {TARGET}",
    "Access-Control-Max-Age": "86400",
}

Handler = Callable[[web.Request], Awaitable[web.Response]]


def cross_origin(handler: Handler) -> Handler:
    """A page from any origin may listen: what counts is the token. Turns refusals into problem JSON (RFC 9457)."""

    async def wrapped(request: web.Request) -> web.Response:
        try:
            response = await handler(request)
        except Refused as refused:
            response = refused.response()
        response.headers.update(CORS)
        return response

    return wrapped


class Refused(Exception):
    """A request that gets an error status; the message is its detail."""

    def __init__(self, status: int, message: object, headers: dict[str, str] | None = None) -> None:
        super().__init__(str(message))
        self._status = status
        self._headers = headers

    def response(self) -> web.Response:
        """Its form on the wire."""
        body = {"status": self._status, "detail": str(self)}
        return web.json_response(body, status=self._status, headers=self._headers, content_type="application/problem+json")


@cross_origin
async def options(request: web.Request) -> web.Response:
    """OPTIONS: the preflight; with a listen token, also where the ICE servers are."""
    response = web.Response(headers={"Accept-Post": SDP, "Accept-Patch": TRICKLE})
    if "Authorization" in request.headers:
        _link(request, response, _session(request))
    return response


@cross_origin
async def discover(request: web.Request) -> web.Response:
    """GET or HEAD of the endpoint or a listener: nothing to see, by the draft."""
    return web.Response(content_type=SDP)


@cross_origin
async def offer(request: web.Request) -> web.Response:
    """POST /v1/whep: listen to a session."""
    if request.content_type != SDP:
        raise Refused(415, f"the body must be {SDP}", {"Accept-Post": SDP})
    owner = request.app[OWNERS].find(_token(request) or "")
    session = _session(request) if owner is None else owner.session
    SESSION.set(session.ident)
    try:
        former, played = request.headers.get(FORMER), _played(request)
        peer, answer = await request.app[PEERS].add(
            session, await _text(request), _most_target_s(request), former, played, None if owner is None else owner.act
        )
    except NoSuchSession as error:
        raise Refused(404, error) from error
    except Occupied as error:
        raise Refused(409, error, {"Retry-After": "1"}) from error
    except BadOffer as error:
        raise Refused(400, error) from error
    location = str(request.app.router["whep-listener"].url_for(ident=peer.ident))
    headers = {"Location": location, TARGET: f"{peer.target_s * 1000:.0f}"}
    response = web.Response(status=201, text=answer, content_type=SDP, headers=headers)
    _link(request, response, session)
    return response


@cross_origin
async def trickle(request: web.Request) -> web.Response:
    """PATCH /v1/whep/ID: candidates of the listener. With or without If-Match, for whip-whep sends none."""
    peer = _peer(request)
    if request.content_type != TRICKLE:
        raise Refused(415, f"the body must be {TRICKLE}", {"Accept-Patch": TRICKLE})
    if request.headers.get("If-Match") == "*":
        raise Refused(422, "ICE restart is not supported; send a new offer instead")
    try:
        await peer.trickle(await _text(request))
    except IceRestart as error:
        raise Refused(422, error) from error
    return web.Response(status=204)


@cross_origin
async def hang_up(request: web.Request) -> web.Response:
    """DELETE /v1/whep/ID: stop listening; the session goes on."""
    await _peer(request).close()
    return web.Response()


def _session(request: web.Request) -> Session:
    try:
        return request.app[SESSIONS].by_token(_token(request))
    except BadToken as error:
        raise Refused(401, error, {"WWW-Authenticate": "Bearer"}) from error
    except NoSuchSession as error:
        raise Refused(404, error) from error


def _link(request: web.Request, response: web.Response, session: Session) -> None:
    """Tell the listener of the ICE servers."""
    for server in ice_servers(request.app[CONFIG], session.ident, time.time()):
        response.headers.add("Link", server.link)


def _peer(request: web.Request) -> Peer:
    peer = request.app[PEERS].get(request.match_info["ident"])
    if peer is None:
        raise Refused(404, "no such listener")
    return peer


def _most_target_s(request: web.Request) -> float | None:
    value = request.headers.get(MOST_TARGET)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{2,4}", value):
        raise Refused(400, f"{MOST_TARGET}: expected milliseconds from 10 to 9999, this is {value[:60]!r}; leave it out if there is no target")
    return int(value) / 1000


def _played(request: web.Request) -> int | None:
    value = request.headers.get(PLAYED)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", value) or int(value) >= 2**32:
        raise Refused(400, f"{PLAYED}: expected an RTP timestamp, this is {value[:60]!r}; leave it out if nothing was played")
    return int(value)


def _token(request: web.Request) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.query.get("token")


async def _text(request: web.Request) -> str:
    try:
        return await request.text()
    except (UnicodeDecodeError, LookupError) as error:
        raise Refused(400, f"the body is not text: {error}") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(413, "the body is too large") from error
