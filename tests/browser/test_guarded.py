"""A gateway with API keys, and a page that reaches it only through a TURN relay."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import Gateway, OpenDemo, serving
from tests.gateway.test_turn import SECRET, relay  # noqa: F401 - a fixture

KEY = "correct-horse-battery-staple"
TALK = """async (token) => {
  const { Session } = await import("/vivavoce.js");
  const session = new Session({ token, rtc: { iceTransportPolicy: "relay" } });
  await session.connect();
  const done = new Promise((resolve) => session.on("done", resolve));
  const heard = new Promise((resolve) => session.on("heard", resolve));
  session.append("A sentence that comes a long way round.");
  session.end();
  await done;
  await heard;
  const { packetsReceived, totalAudioEnergy } = await session.stats();
  session.close();
  return { packetsReceived, totalAudioEnergy };
}"""


@pytest.fixture
def guarded(wav_engine: str, relay: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:  # noqa: F811
    """A gateway that wants a key, and names a relay."""
    monkeypatch.setenv("VIVAVOCE_API_KEYS", KEY)
    monkeypatch.setenv("VIVAVOCE_ICE_SERVERS", f"turn:127.0.0.1:{relay}?transport=udp")
    monkeypatch.setenv("VIVAVOCE_TURN_SECRET", SECRET)
    with serving(tmp_path, "--engine", wav_engine) as gateway:
        yield gateway


def token_of(gateway: Gateway) -> str:
    """What the page's own server would do."""
    request = urllib.request.Request(gateway.url + "/v1/tokens", method="POST", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["token"])


async def test_through_the_relay_and_with_a_token(guarded: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(guarded.url)
    counters = await demo.page.evaluate(TALK, token_of(guarded))
    assert counters["packetsReceived"] > 100 and counters["totalAudioEnergy"] > 0.01


async def test_the_page_says_that_a_key_is_needed_and_speaks_with_a_token(guarded: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(guarded.url)
    await demo.page.click("#connect")
    assert "an API key is needed" in await demo.problem()
    await demo.page.close()
    demo = await open_demo(f"{guarded.url}/#token={token_of(guarded)}")
    await demo.connect(settles=False)
    await demo.say("With a token it speaks.")
