"""Session tokens: `POST /v1/tokens` with an API key. A page's server asks for one; the page opens its session with it."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from aiohttp import web

from gateway.keys import ACCESS, CALLERS, CONFIG, METRICS
from gateway.refusal import Refusal


class TokenBody(msgspec.Struct, frozen=True):
    """What the token is to be; an empty body will do. `ttl_s`: seconds it is good for, at most the gateway's token_ttl_s."""

    ttl_s: Annotated[int, msgspec.Meta(ge=1)] | None = None


async def create(request: web.Request) -> web.Response:
    """POST /v1/tokens."""
    try:
        return await _create(request)
    except Refusal as refusal:
        request.app[METRICS].refused(refusal.code)
        return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)


async def _create(request: web.Request) -> web.Response:
    holder = request.app[ACCESS].key_holder(request)
    most = request.app[CONFIG].token_ttl_s
    try:
        body = msgspec.json.decode(await request.read() or b"{}", type=TokenBody)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Refusal(400, "invalid_request", f'{str(error).replace("`$.", "`")}; send {{"ttl_s": SECONDS}} or nothing') from error
    ttl_s = body.ttl_s or most
    if ttl_s > most:
        raise Refusal(400, "invalid_request", f"ttl_s: {ttl_s} is more than token_ttl_s, {most}; ask for less")
    with request.app[CALLERS].opened(holder, time.monotonic()):
        token = request.app[ACCESS].token(holder, ttl_s)
    return web.json_response({"token": token, "expires_in_s": ttl_s}, headers={"Cache-Control": "no-store"})
