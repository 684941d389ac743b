"""WHEP's HTTP side: statuses, headers, and offers that cannot be served."""

from __future__ import annotations

import random
import time

import pytest

from gateway.keys import PEERS
from tests.gateway.clients import Listener, until

SDP = {"Content-Type": "application/sdp"}
TRICKLE = {"Content-Type": "application/trickle-ice-sdpfrag"}


@pytest.fixture
async def offer(gateway):
    listener = Listener(gateway)
    yield await listener.offer()
    await listener.close()


def bearer(speaker) -> dict[str, str]:
    return SDP | {"Authorization": f"Bearer {speaker.created['token']}"}


async def test_answer(connect, gateway, offer) -> None:
    speaker = await connect("webrtc")
    assert speaker.created["whep"] == str(gateway.make_url("/v1/whep"))
    async with gateway.post("/v1/whep", params={"token": speaker.created["token"]}, data=offer, headers=SDP) as response:
        assert response.status == 201
        assert response.content_type == "application/sdp"
        assert response.headers["Location"].startswith("/v1/whep/")
        assert "Location" in response.headers["Access-Control-Expose-Headers"]
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        answer = await response.text()
    assert "a=sendonly" in answer and "opus/48000" in answer and "a=candidate" in answer
    async with gateway.delete(response.headers["Location"]) as gone:
        assert gone.status == 200
    async with gateway.delete(response.headers["Location"]) as gone:
        assert gone.status == 404


async def test_a_listener_cannot_ask_for_packets_again(connect, gateway, offer) -> None:
    """None are kept (gateway.rtc.peer): one that may ask for them would wait for them."""
    speaker = await connect("webrtc")
    number = next(line.split()[0].removeprefix("a=rtpmap:") for line in offer.splitlines() if "opus/48000" in line)
    asking = offer.replace(f"a=rtpmap:{number} ", f"a=rtcp-fb:{number} nack\r\na=rtpmap:{number} ")
    assert "nack" in asking
    async with gateway.post("/v1/whep", data=asking, headers=bearer(speaker)) as response:
        assert response.status == 201
        answer = await response.text()
    assert "opus/48000" in answer and "nack" not in answer


async def test_preflight(gateway) -> None:
    for path in ("/v1/whep", "/v1/whep/some-listener"):
        async with gateway.options(path) as response:
            assert response.status == 200
            assert response.headers["Accept-Post"] == "application/sdp"
            assert "PATCH" in response.headers["Access-Control-Allow-Methods"]
            assert "Authorization" in response.headers["Access-Control-Allow-Headers"]


async def test_tokens(connect, gateway, offer) -> None:
    speaker = await connect("webrtc")
    ident = speaker.created["session"]
    for token, status in ((None, 401), ("", 401), ("nonsense", 401), (f"{ident}.wrong", 401), ("gone.secret", 404), (f"{ident}.\u00e9", 401)):
        headers = SDP if token is None else SDP | {"Authorization": f"Bearer {token}"}
        async with gateway.post("/v1/whep", data=offer, headers=headers) as response:
            assert response.status == status, token
            assert response.headers["Access-Control-Allow-Origin"] == "*"
    await speaker.close()
    async with gateway.post("/v1/whep", data=offer, headers=bearer(speaker)) as response:
        assert response.status == 404


async def test_bad_offers(connect, listen, gateway, offer) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    bad = {
        "empty": "",
        "not SDP": "hello",
        "half": offer[: len(offer) // 2],
        "no audio": offer.replace("m=audio", "m=video"),
        "we should listen": offer.replace("a=recvonly", "a=sendonly"),
        "no opus": offer.replace("opus/48000", "speex/48000"),
        "no fingerprint": "\r\n".join(line for line in offer.splitlines() if not line.startswith("a=fingerprint")),
        "no ice": "\r\n".join(line for line in offer.splitlines() if not line.startswith("a=ice")),
        "twice": offer + offer[offer.index("m=audio") :],
    }
    for name, sdp in bad.items():
        async with gateway.post("/v1/whep", data=sdp, headers=bearer(speaker)) as response:
            assert response.status == 400, (name, await response.text())
            assert (await response.json(content_type="application/problem+json"))["detail"]
    async with gateway.post("/v1/whep", data=b"\xff\xfe\xfd", headers=bearer(speaker)) as response:
        assert response.status == 400
    async with gateway.post("/v1/whep", data=offer, headers=bearer(speaker) | {"Content-Type": "application/json"}) as response:
        assert response.status == 415
    async with gateway.post("/v1/whep", data="v" * (1 << 19), headers=bearer(speaker)) as response:
        assert response.status == 413
    await speaker.say("The first listener is still there.")
    await until(lambda: len(listener.arrivals) > 50)


async def test_no_mutilated_offer_is_an_error_of_ours(connect, listen, gateway) -> None:
    speaker = await connect("webrtc")
    template = Listener(gateway)
    lines = (await template.offer(channel=True)).splitlines()
    chance = random.Random(5)
    for _ in range(100):
        mutilated = list(lines)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(mutilated))
            match chance.randrange(4):
                case 0:
                    del mutilated[place]
                case 1:
                    mutilated.insert(place, chance.choice(lines))
                case 2:
                    mutilated[place] = mutilated[place][: chance.randrange(len(mutilated[place]) + 1)]
                case _:
                    mutilated[place] = mutilated[place].replace(chance.choice("0123456789 :/="), chance.choice(["", "x", "-1", "9" * 20]))
        async with gateway.post("/v1/whep", data="\r\n".join(mutilated) + "\r\n", headers=bearer(speaker)) as response:
            assert response.status in (201, 400), mutilated
    await template.close()
    listener = await listen(speaker)
    await speaker.say("And a good one works.")
    await until(lambda: len(listener.arrivals) > 50)
    await until(lambda: len(gateway.app[PEERS]._peers) == 1)


@pytest.mark.real_time
async def test_mdns_candidates_do_not_delay_the_answer(connect, gateway, offer) -> None:
    speaker = await connect("webrtc")
    local = "a=candidate:1 1 udp 2113937151 5f2d6d2e-0000-4b1c-9d3c-0f0e0d0c0b0a.local 50000 typ host"
    sdp = "\r\n".join(local if line.startswith("a=candidate") else line for line in offer.splitlines()) + "\r\n"
    assert ".local" in sdp
    begun_s = time.monotonic()
    async with gateway.post("/v1/whep", data=sdp, headers=bearer(speaker)) as response:
        assert response.status == 201
    assert time.monotonic() - begun_s < 0.5


async def test_trickle(connect, listen, gateway) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker)
    ufrag = next(line for line in listener.connection.localDescription.sdp.splitlines() if line.startswith("a=ice-ufrag"))
    fragment = (
        f"{ufrag}\r\nm=audio 9 UDP/TLS/RTP/SAVPF 0\r\na=mid:0\r\na=candidate:1 1 udp 2122129151 192.0.2.7 60000 typ host\r\n"
        "a=candidate:nonsense\r\na=candidate:2 1 udp 2122129151 x.local 60000 typ host\r\na=end-of-candidates\r\n"
    )
    for body, headers, status in (
        (fragment, TRICKLE, 204),
        (fragment, TRICKLE | {"If-Match": '"etag"'}, 204),
        ("", TRICKLE, 204),
        (fragment, TRICKLE | {"If-Match": "*"}, 422),
        (fragment.replace(ufrag, "a=ice-ufrag:othr"), TRICKLE, 422),
        (fragment, SDP, 415),
    ):
        async with gateway.patch(listener.location, data=body, headers=headers) as response:
            assert response.status == status, (body, headers)
    async with gateway.patch("/v1/whep/nobody", data=fragment, headers=TRICKLE) as response:
        assert response.status == 404
    await speaker.say("Still connected.")
    await until(lambda: len(listener.arrivals) > 30)


async def test_page_and_operations(gateway) -> None:
    for path, status, kind in (
        ("/", 200, "text/html"),
        ("/health", 200, "application/json"),
        ("/ready", 200, "application/json"),
        ("/__init__.py", 404, "text/plain"),
        ("/..%2Fpyproject.toml", 404, "text/plain"),
        ("/%2e%2e/gateway/app.html", 404, "text/plain"),
    ):
        async with gateway.get(path) as response:
            assert (response.status, response.content_type) == (status, kind), path
