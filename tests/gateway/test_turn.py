"""ICE servers: how listeners learn of them, and sound through Debian's coturn with the credentials the gateway makes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aioice.stun
import aioice.turn
import msgspec
import pytest
from aiohttp.test_utils import TestClient
from aiortc import RTCConfiguration, RTCIceServer, RTCIceTransportPolicy

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.pool import EnginePool
from gateway.rtc.ice import host_addresses
from gateway.rtc.turn import ice_servers
from tests.gateway.clients import Listener, Speaker
from tests.gateway.conftest import Client, Server
from tests.gateway.matching import align
from tests.gateway.stand_in import StandInEngine

CONF = Path(__file__).parents[2] / "deploy" / "coturn" / "turnserver.conf"
SECRET = "a secret of gateway and relay"
LINK = re.compile(
    r'<(?P<urls>[^>]+)>; rel="ice-server"(?:; username="(?P<username>[^"]+)"; credential="(?P<credential>[^"]+)"; credential-type="password")?'
)


@pytest.fixture(scope="module")
def relay() -> Iterator[int]:
    """The UDP port of a coturn on loopback; `make system` installs it."""
    server = shutil.which("turnserver")
    assert server is not None, "coturn is missing: apt install coturn"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As deploy/compose.yaml starts it, but for the addresses.
    options = ["-c", str(CONF), f"--static-auth-secret={SECRET}", *(f"--allowed-peer-ip={address}" for address in host_addresses(True, False))]
    options += [
        "--listening-ip=127.0.0.1",
        "--relay-ip=127.0.0.1",
        f"--listening-port={port}",
        "--allow-loopback-peers",
        "--pidfile=",
        "--userdb=:memory:",
    ]
    process = subprocess.Popen([server, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until a STUN binding request is answered."""
    deadline_s = time.monotonic() + 60
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(0.2)
        while time.monotonic() < deadline_s:
            assert process.poll() is None, "coturn ended"
            try:
                probe.sendto(bytes.fromhex("000100002112a442") + bytes(12), ("127.0.0.1", port))
                probe.recv(1500)
                return
            except OSError:
                continue
    raise AssertionError("coturn does not answer")


@pytest.fixture
async def relayed(config: GatewayConfig, relay: int) -> AsyncIterator[Client]:
    """A gateway that tells its listeners of that coturn, and of a STUN server."""
    servers = ["stun:stun.example.net:3478", f"turn:127.0.0.1:{relay}?transport=udp"]
    changed = msgspec.structs.replace(config, ice_servers=servers, turn_secret=SECRET)
    async with EnginePool(changed) as engines, TestClient(Server(create_app(changed, engines))) as client:
        await engines.first_start()
        yield client


def relay_only(servers: list[dict[str, str]]) -> RTCConfiguration:
    """As a browser behind a strict firewall."""
    turn = [RTCIceServer(**server) for server in servers if server["urls"].startswith("turn")]
    return RTCConfiguration(iceServers=turn, iceTransportPolicy=RTCIceTransportPolicy.RELAY)


def test_credentials_are_those_of_coturns_rest_scheme() -> None:
    config = GatewayConfig(ice_servers=["stun:a.example", "turn:b.example?transport=tcp"], turn_secret=SECRET, turn_ttl_s=600)
    stun, turn = ice_servers(config, "a-session", 1000.9)
    assert (stun.urls, stun.username, stun.credential, stun.link) == ("stun:a.example", None, None, '<stun:a.example>; rel="ice-server"')
    assert turn.username == "1600:a-session"
    assert turn.credential == base64.b64encode(hmac.new(SECRET.encode(), b"1600:a-session", hashlib.sha1).digest()).decode()
    link = LINK.fullmatch(turn.link)
    assert link is not None and link.groupdict() == {"urls": turn.urls, "username": turn.username, "credential": turn.credential}


async def test_a_listener_behind_a_firewall_hears_through_the_relay(relayed: Client, relay: int, engine: StandInEngine) -> None:
    speaker = await Speaker.connect(relayed)
    servers = speaker.created["ice_servers"]
    assert servers[0] == {"urls": "stun:stun.example.net:3478"}
    assert servers[1]["urls"] == f"turn:127.0.0.1:{relay}?transport=udp"
    expiry, _, name = servers[1]["username"].partition(":")
    assert name == speaker.created["session"] and 3590 <= int(expiry) - time.time() <= 3600
    await speaker.send("session.update", audio={"format": "webrtc"})
    await speaker.event("session.updated")
    listener = Listener(relayed, relay_only(servers))
    await listener.connect(speaker.created["token"])
    local = [line for line in listener.connection.localDescription.sdp.splitlines() if line.startswith("a=candidate")]
    assert local and all("typ relay" in line for line in local)
    await speaker.say("A sentence that has come a long way round, and is whole.")
    await speaker.say("End.")
    _, scores = align(listener.samples, bytes(engine.utterances[0].pcm))
    assert min(scores) >= 0.9
    await listener.close()
    await speaker.close()


async def test_whep_tells_who_may_listen_and_nobody_else(relayed: Client) -> None:
    speaker = await Speaker.connect(relayed)
    token = {"Authorization": f"Bearer {speaker.created['token']}"}
    listener = Listener(relayed)
    async with relayed.post("/v1/whep", data=await listener.offer(), headers=token | {"Content-Type": "application/sdp"}) as response:
        assert response.status == 201
        links = [LINK.fullmatch(link) for link in response.headers.getall("Link")]
    assert [link["urls"] for link in links if link] == [server["urls"] for server in speaker.created["ice_servers"]]
    async with relayed.options("/v1/whep", headers=token) as response:
        assert response.status == 200 and len(response.headers.getall("Link")) == 2
        assert "Link" in response.headers["Access-Control-Expose-Headers"]
    async with relayed.options("/v1/whep") as response:
        assert response.status == 200 and "Link" not in response.headers
    async with relayed.options("/v1/whep", headers={"Authorization": "Bearer x.y"}) as response:
        assert response.status == 404 and "Link" not in response.headers
    await listener.close()
    await speaker.close()


@pytest.mark.parametrize("how", ["expired", "forged"])
async def test_the_relay_takes_no_other_credentials(relay: int, how: str) -> None:
    config = GatewayConfig(ice_servers=[f"turn:127.0.0.1:{relay}"], turn_secret=SECRET)
    (turn,) = ice_servers(config, "a-session", time.time() - 7200 if how == "expired" else time.time())
    assert turn.username is not None and turn.credential is not None
    credential = turn.credential if how == "expired" else turn.credential[::-1]
    with pytest.raises(aioice.stun.TransactionFailed, match="401"):
        await aioice.turn.create_turn_endpoint(
            asyncio.DatagramProtocol,
            server_addr=("127.0.0.1", relay),
            username=turn.username,
            password=credential,
        )
