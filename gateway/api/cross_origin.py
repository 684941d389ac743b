"""CORS: pages of allowed origins may read the answers to their HTTP requests. (WHEP has its own, for its token is what counts.)"""

from __future__ import annotations

from aiohttp import web

from gateway.api.native import WHEP_PATH
from gateway.keys import ACCESS
from gateway.refusal import Refusal

PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type",
    "Access-Control-Max-Age": "600",
}
EXPOSED = "Retry-After, x-request-id, x-sample-rate"


async def preflight(request: web.Request) -> web.Response:
    """OPTIONS of the speech API."""
    try:
        request.app[ACCESS].check_origin(request)
    except Refusal as refusal:
        return web.json_response(refusal.body, status=refusal.status)
    return web.Response(status=204, headers=PREFLIGHT)


async def allow(request: web.Request, response: web.StreamResponse) -> None:
    """Before any answer leaves: name the page's origin if it is an allowed one."""
    origin = request.headers.get("Origin")
    if origin is None or request.path.startswith(WHEP_PATH):
        return
    response.headers["Vary"] = "Origin"
    try:
        request.app[ACCESS].check_origin(request)
    except Refusal:
        return
    response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Access-Control-Expose-Headers"] = EXPOSED
