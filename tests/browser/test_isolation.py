"""Two browsers at one gateway, speaking at once: neither hears, or is told, anything of the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import WebSocket

from tests.browser.conftest import Gateway, serving, tabs
from tests.browser.demo import Demo
from tests.browser.spelling import Speller, levels, once, read

LOW, HIGH = "abcdefgh", "mnopqrst"
SAYS = {
    LOW: ["aaa ccc eee bbb ggg ddd fff hhh", "hhh aaa fff bbb ddd ggg ccc eee"],
    HIGH: ["mmm ooo qqq nnn sss ppp rrr ttt nnn qqq mmm ttt ooo rrr ppp sss"],
}
LEAK = 0.1
"""How loud the other's sound may be; 1 is as loud as where it belongs. 20 ms of it that were taken for one's own before they are encoded make
0.47, four Opus packets of it 0.34 or more, and Opus itself 0.01. (Fewer packets spoil one's own sound and bring next to nothing along.)"""
NOTE_CHANNEL = """() => {
  window.channelled = [];
  const create = RTCPeerConnection.prototype.createDataChannel;
  RTCPeerConnection.prototype.createDataChannel = function (...given) {
    const channel = create.apply(this, given);
    channel.addEventListener("message", ({ data }) => channelled.push(data));
    return channel;
  };
}"""


@pytest.fixture
async def spelling(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway whose engine spells; that lives in this event loop, which therefore must not wait for the gateway's start."""
    endpoint = f"ipc://{tmp_path}/speller"
    async with Speller(endpoint):
        with ExitStack() as stack:
            yield await asyncio.to_thread(stack.enter_context, serving(tmp_path, "--engine", endpoint))


class Told:
    """Everything a page is sent, but for sound."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._socket: list[str] = []
        demo.page.on("websocket", self._note)

    def _note(self, socket: WebSocket) -> None:
        socket.on("framereceived", lambda frame: self._socket.append(str(frame)))

    async def events(self, done: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """By its WebSocket, and by its data channel, once that has told of so many ends."""
        await self._demo.page.wait_for_function(
            "(done) => channelled.filter((message) => message.includes('utterance.done')).length >= done", arg=done
        )
        channelled: list[str] = await self._demo.page.evaluate("channelled")
        return [json.loads(frame) for frame in self._socket], [json.loads(message) for message in channelled]


async def test_two_browsers_hear_and_are_told_nothing_of_each_other(spelling: Gateway, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(tabs(tmp_path / f"profile-{name}")) for name in ("low", "high")]
        demos = dict(zip(SAYS, [await open_demo(spelling.url) for open_demo in opened], strict=True))
        told = {letters: Told(demo) for letters, demo in demos.items()}
        for demo in demos.values():
            await demo.page.evaluate(NOTE_CHANNEL)
            await demo.connect(settles=False)
            await demo.clear_recording()
        for letters, demo in demos.items():
            await demo.page.evaluate("(texts) => texts.forEach((text) => { vivavoce.session.append(text); vivavoce.session.end(); })", SAYS[letters])
        await asyncio.gather(*(demo.until_heard() for demo in demos.values()))
        assert all([await demo.count("done") < len(SAYS[letters]) for letters, demo in demos.items()]), "they do not speak at once"
        await asyncio.gather(*(demo.until("done", len(SAYS[letters])) for letters, demo in demos.items()))

        sessions = {letters: await demo.page.evaluate("vivavoce.session.id") for letters, demo in demos.items()}
        assert len(set(sessions.values())) == 2
        for mine, other in ((LOW, HIGH), (HIGH, LOW)):
            recording = await demos[mine].recording()
            astray = levels(recording, other).max()
            print(f"of the other's sound there is {astray:.4f}")
            assert astray < LEAK
            assert read(recording, mine) == once("".join(SAYS[mine]))
            for events in await told[mine].events(len(SAYS[mine])):
                done = [event for event in events if event["type"] == "utterance.done"]
                assert [(event["utterance"], event["text"]) for event in done] == list(enumerate(SAYS[mine], 1))
                assert {event["utterance"] for event in events if "utterance" in event} == {event["utterance"] for event in done}
                assert {event["session"] for event in events if "session" in event} <= {sessions[mine]}
            shown = await demos[mine].page.locator("#utterances mark").all_inner_texts()
            assert sorted(shown) == sorted(SAYS[mine])
