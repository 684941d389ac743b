"""What aioice has no setting for. Where listeners can reach us: it leaves loopback out, which is all that a machine without a network has.
And an end: a connection closed in the moment in which its checks succeed goes on asking for consent, of nobody, for ever."""

from __future__ import annotations

import aioice.ice

LOOPBACK = "127.0.0.1"

_found = aioice.ice.get_host_addresses
_query_consent = aioice.ice.Connection.query_consent


def host_addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
    """The addresses aioice finds, or loopback if it finds none."""
    return _found(use_ipv4, use_ipv6) or [LOOPBACK]


async def query_consent(connection: aioice.ice.Connection) -> None:
    """As aioice does, but not for a connection that has been closed meanwhile."""
    if not connection._closing:
        await _query_consent(connection)


def install() -> None:
    """Make aioice use these. The pinned version looks both up by their names."""
    aioice.ice.get_host_addresses = host_addresses
    aioice.ice.Connection.query_consent = query_consent  # type: ignore[method-assign, assignment]
