"""What is typed is heard: the page's own recording against what the engine made."""

from __future__ import annotations

import statistics

import av
import numpy as np

from gateway.media.opus import PACKET_BYTES, OpusEncoder
from tests.browser.conftest import Gateway, OpenDemo, read_wav
from tests.browser.matching import RATE, Signal, match, resample

UTTERANCES = 10
BEGINNINGS = 20
BEGUN_MS = 450
GREETS_AFTER_MS = (0, 100, 300)
GREETINGS_EACH = 3


def through_opus(signal: Signal) -> Signal:
    """The signal as the gateway's encoder and any decoder leave it."""
    samples = np.round(signal * 32767).astype("<i2")
    pcm = samples.tobytes() + bytes(-len(samples) * 2 % PACKET_BYTES)
    decoder = av.CodecContext.create("opus", "r")
    decoder.sample_rate, decoder.layout = 48000, "mono"
    frames = [frame for payload in OpusEncoder().encode(pcm) for frame in decoder.decode(av.Packet(payload))]
    decoded = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
    return resample(decoded if decoded.dtype == np.int16 else np.clip(decoded, -1, 1) * 32767, 48000)


async def test_ten_of_ten_utterances_and_twenty_of_twenty_beginnings_arrive_whole(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    matches = []
    for number in range(UTTERANCES):
        async for recording in demo.attempts(f"Typed by hand, line {number}."):
            found = match(known, recording)
            if not found.problems():
                break
        matches.append(found)
    begun = known[: RATE * BEGUN_MS // 1000]
    for number in range(UTTERANCES, BEGINNINGS):
        # Each behind one that was stopped, with the mute that goes with it.
        async for recording in demo.attempts(f"Begun by hand, line {number}.", BEGUN_MS):
            head = match(begun, recording)
            if not head.problems():
                break
        matches.append(head)
    report = {number: found.problems() for number, found in enumerate(matches) if found.problems()}
    worst, spread_ms = min(found.worst for found in matches), max(found.lag_spread_s for found in matches) * 1000
    first_sound_ms = statistics.median(await demo.first_sounds_ms())
    print(f"worst correlation {worst:.3f}, widest lag spread {spread_ms:.1f} ms, first letter to first sound {first_sound_ms:.0f} ms")
    assert report == {}


async def test_a_greeting_said_at_once_on_connecting_begins_whole(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal) -> None:
    demo = await open_demo(wav_gateway.url)
    begun = known[: RATE * BEGUN_MS // 1000]
    matches = []
    for after_ms in GREETS_AFTER_MS * GREETINGS_EACH:
        async for recording in demo.greetings(f"Said after {after_ms} ms.", after_ms):
            head = match(begun, recording)
            if not head.problems():
                break
        matches.append((after_ms, head))
    worst, spread_ms = min(head.worst for _, head in matches), max(head.lag_spread_s for _, head in matches) * 1000
    print(f"worst correlation {worst:.3f}, widest lag spread {spread_ms:.1f} ms")
    assert [(after_ms, head.problems()) for after_ms, head in matches if head.problems()] == []


async def test_the_embedded_voice_arrives_whole(gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(gateway.url)
    await demo.connect()
    async for recording in demo.attempts("Hello, we are well."):
        session, utterance = await demo.page.evaluate("[vivavoce.session.id, Math.max(...vivavoce.session.utterances.keys())]")
        made = read_wav(gateway.tap / f"{session}-{utterance}.wav")
        # Opus keeps no waveform of an s or an f, and a sampled voice says what it says: what is tested is what came after the encoder.
        found = match(through_opus(made), recording)
        if not found.problems():
            break
    direct, spread_ms = match(made, recording).worst, found.lag_spread_s * 1000
    print(f"worst correlation {found.worst:.3f}, with the PCM {direct:.3f}, lag spread {spread_ms:.1f} ms")
    assert found.problems() == []
