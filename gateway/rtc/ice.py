"""Where listeners can reach us: aioice leaves loopback out, which is all that a machine without a network has."""

from __future__ import annotations

import aioice.ice

LOOPBACK = "127.0.0.1"

_found = aioice.ice.get_host_addresses


def host_addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
    """The addresses aioice finds, or loopback if it finds none."""
    return _found(use_ipv4, use_ipv6) or [LOOPBACK]


def install() -> None:
    """Make aioice use `host_addresses`. It has no setting for it; the pinned version looks the function up by this name."""
    aioice.ice.get_host_addresses = host_addresses
