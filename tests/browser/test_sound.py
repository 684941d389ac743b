"""What is typed is heard: the page's own recording against what the engine made."""

from __future__ import annotations

import statistics

import pytest

from tests.browser.conftest import Gateway, OpenDemo, read_wav
from tests.browser.matching import Signal, match

UTTERANCES = 10


async def test_ten_of_ten_utterances_arrive_whole(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    matches = []
    for number in range(UTTERANCES):
        await demo.clear_recording()
        await demo.say(f"Typed by hand, line {number}.")
        matches.append(match(known, await demo.recording()))
    report = {number: found.problems() for number, found in enumerate(matches) if found.problems()}
    worst, spread_ms = min(found.worst for found in matches), max(found.lag_spread_s for found in matches) * 1000
    first_sound_ms = statistics.median(await demo.first_sounds_ms())
    print(f"worst correlation {worst:.3f}, widest lag spread {spread_ms:.1f} ms, first letter to first sound {first_sound_ms:.0f} ms")
    assert report == {}


async def test_the_embedded_voice_arrives_whole(gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(gateway.url)
    await demo.connect()
    await demo.say("Hello, we are well.")
    recording = await demo.recording()
    session = await demo.page.evaluate("vivavoce.session.id")
    tapped = gateway.tap / f"{session}-1.wav"
    if not tapped.exists():
        pytest.skip("the gateway has no VIVAVOCE_TAP")
    found = match(read_wav(tapped), recording)
    print(f"worst correlation {found.worst:.3f}, lag spread {found.lag_spread_s * 1000:.1f} ms, first sound {await demo.first_sounds_ms()}")
    assert found.problems() == []
