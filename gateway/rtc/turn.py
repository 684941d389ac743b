"""ICE servers, as listeners are told of them. TURN credentials follow coturn's REST scheme: the user name is an expiry and a name,
the password its HMAC-SHA1 under the secret that gateway and TURN server share, so the TURN server keeps no accounts."""

from __future__ import annotations

import base64
import hashlib
import hmac

import msgspec

from gateway.config import GatewayConfig


class IceServer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What RTCPeerConnection takes in `iceServers`."""

    urls: str
    username: str | None = None
    credential: str | None = None

    @property
    def link(self) -> str:
        """The value of a Link header, as WHEP has it."""
        if self.username is None:
            return f'<{self.urls}>; rel="ice-server"'
        return f'<{self.urls}>; rel="ice-server"; username="{self.username}"; credential="{self.credential}"; credential-type="password"'


def ice_servers(config: GatewayConfig, name: str, now_s: float) -> list[IceServer]:
    """The configured servers, with credentials for `name` that expire `turn_ttl_s` after `now_s` (seconds since 1970)."""
    servers = []
    for urls in config.ice_servers:
        if urls.startswith("turn") and config.turn_secret is not None:
            username = f"{int(now_s) + config.turn_ttl_s}:{name}"
            digest = hmac.digest(config.turn_secret.encode(), username.encode(), hashlib.sha1)
            servers.append(IceServer(urls, username, base64.b64encode(digest).decode()))
        else:
            servers.append(IceServer(urls))
    return servers
