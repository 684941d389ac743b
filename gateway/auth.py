"""Who may speak: API keys, session tokens made with one, and web pages of which origin.

An API key is a server's secret and goes into a header. A browser's WebSocket cannot send headers: its page's server asks for a
session token, a JWT that is good for minutes, and the page puts that into the address."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time

import jwt
from aiohttp import web
from yarl import URL

from gateway.config import GatewayConfig
from gateway.refusal import Refusal

ALGORITHM = "HS256"
AUDIENCE = "vivavoce"


class Access:
    """The rules of one gateway; every refusal names its remedy."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._keys = {_digest(key): f"key-{_digest(key)[:8]}" for key in config.api_keys}
        self._secret = config.session_secret or secrets.token_urlsafe(32)

    def caller(self, request: web.Request) -> str:
        """Who asks: a key's name, which tells nothing of the key, or the address where no keys are set. Raises Refusal."""
        self.check_origin(request)
        if not self._keys:
            return request.remote or "unknown"
        given = bearer(request)
        if given is None:
            token = request.query.get("token")
            if token is None:
                raise Refusal(401, "unauthorized", "an API key is needed: Authorization: Bearer KEY, or ?token=SESSION_TOKEN (POST /v1/tokens)")
            return self._of_token(token)
        return self._of_key(given) or self._of_token(given)

    def key_holder(self, request: web.Request) -> str:
        """As `caller`, for what takes an API key itself. Raises Refusal."""
        self.check_origin(request)
        if not self._keys:
            return request.remote or "unknown"
        holder = self._of_key(bearer(request) or "")
        if holder is None:
            raise Refusal(401, "unauthorized", "an API key is needed: Authorization: Bearer KEY; a session token does not do")
        return holder

    def token(self, caller: str, ttl_s: int) -> str:
        """A session token for `caller`, good for `ttl_s`."""
        now_s = int(time.time())
        claims = {"aud": AUDIENCE, "sub": caller, "iat": now_s, "exp": now_s + ttl_s, "jti": secrets.token_urlsafe(9)}
        return jwt.encode(claims, self._secret, ALGORITHM)

    def check_origin(self, request: web.Request) -> None:
        """Raises Refusal for a web page that may not speak here. Programs send no Origin; a browser always sends the page's."""
        origin = request.headers.get("Origin")
        if origin is None or "*" in self._config.allowed_origins or origin in self._config.allowed_origins:
            return
        page = URL(origin) if "://" in origin else None
        if page is not None and self._config.public_url is not None and page == URL(self._config.public_url).origin():
            return
        own = page is not None and page.host is not None and page.authority == request.host
        # A name that some DNS server made point here would be our own origin to the browser; a key tells friend from foe then.
        if own and page is not None and (self._keys or _is_ours(page.host or "")):
            return
        raise Refusal(403, "origin_not_allowed", f"Origin: pages of {origin[:100]} may not speak here; add it to allowed_origins")

    def _of_key(self, key: str) -> str | None:
        digest = _digest(key)
        # All are compared, each in constant time.
        found = [name for known, name in self._keys.items() if hmac.compare_digest(known, digest)]
        return found[0] if found else None

    def _of_token(self, token: str) -> str:
        try:
            claims = jwt.decode(token, self._secret, [ALGORITHM], audience=AUDIENCE, options={"require": ["exp", "sub", "aud"]})
        except jwt.ExpiredSignatureError as error:
            raise Refusal(401, "token_expired", "the session token has expired; get a new one (POST /v1/tokens)") from error
        except jwt.InvalidTokenError as error:
            raise Refusal(401, "unauthorized", "neither an API key nor a session token of this gateway") from error
        if claims["sub"] not in self._keys.values():
            raise Refusal(401, "unauthorized", "the session token's API key is not valid any more; get a new token (POST /v1/tokens)")
        return str(claims["sub"])


def bearer(request: web.Request) -> str | None:
    """What the request shows as bearer."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _is_ours(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
