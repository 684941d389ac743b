"""Barge-in as a listener knows it: silence at once, nothing of what was cancelled afterwards, and an honest word on what was heard."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from playwright.async_api import Page

from tests.browser.conftest import Gateway, OpenDemo
from tests.browser.demo import Demo
from tests.browser.matching import RATE, Signal, find, rms

SILENT_WITHIN_S = 0.1
HEARD_WITHIN_MS = 120
AUDIBLE = 0.005
LINE = "This line is long enough to be stopped in the middle."
TRIES = 4

GUEST = """async ({ whep, token }) => {
  const { Listener } = await import("/listener.js");
  const { Tap } = await import("/tap.js");
  const { Recorder } = await import("/recorder.js");
  window.listener = new Listener(document.getElementById("speaker"));
  window.tap = new Tap();
  window.recording = new Recorder();
  await listener.prepare();
  await listener.connect(whep, token, AbortSignal.timeout(10_000));
  await tap.attach(listener.stream);
  tap.onblock = (block) => recording.add(block);
  tap.ononset = () => (window.begunAt ??= tap.onsetAt);
}"""
SOUNDS = "tap.heardAt - tap.audibleAt < 50"
# A timer that is due earlier fires first, however late both are: what had nothing to wait for has ended by then, and a page that waits until nothing
# can be left of what was cancelled (1.5 s) has not.
CANCEL_AND_LOOK = """async () => {
  const { session } = vivavoce;
  session.cancel();
  await session.ping();
  await new Promise((resolve) => setTimeout(resolve, 700));
  return session.stream.getAudioTracks()[0].enabled;
}"""
SAMPLES = """async (recorder) => {
  const bytes = new Uint8Array(await eval(recorder).wav().arrayBuffer());
  return Array.from(new Int16Array(bytes.buffer, 44));
}"""


async def samples(page: Page, recorder: str) -> Signal:
    """What was recorded on this page, at RATE."""
    recorded = np.array(await page.evaluate(SAMPLES, recorder), dtype=np.float64) / 32768
    return recorded[::2]


async def note_events(page: Page) -> None:
    """From now on the page keeps what the gateway says in `said`."""
    await page.evaluate("""() => {
      window.said = [];
      for (const type of ["started", "heard", "playback", "done", "cancelled"])
        vivavoce.session.on(type, ({ utterance, ...rest }) => said.push({ type, ...rest, ...structuredClone(utterance ?? {}) }));
    }""")


async def said(page: Page, kind: str) -> list[dict[str, Any]]:
    return [event for event in await page.evaluate("said") if event["type"] == kind]


async def speaking(demo: Demo, for_ms: int, act: str = "vivavoce.session.cancel()") -> float:
    """The page speaks, and its recording begins with silence before it; after so long it acts. Returns where its recording was then, in seconds."""
    await demo.clear_recording()
    return await demo.speak(LINE, for_ms, act)


def silence(recording: Signal, from_s: float, until_s: float | None = None) -> float:
    """The loudest sample of a stretch."""
    stretch = recording[round(from_s * RATE) : None if until_s is None else round(until_s * RATE)]
    return float(np.abs(stretch).max()) if len(stretch) else 0.0


# The last while the sentence still sounds: it ends in silence, which a recording does not show.
@pytest.mark.parametrize("for_ms", [300, 1100, 1800])
async def test_heard_is_what_the_recording_shows(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal, for_ms: int) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    await note_events(demo.page)
    async for _ in demo.tries():
        over = await demo.over()
        at_s = await speaking(demo, for_ms)
        await demo.until_over(over + 1)
        await demo.page.wait_for_timeout(300)
        recording = await demo.recording()
        after = silence(recording, at_s + SILENT_WITHIN_S)
        begun_s = find(known, recording[: round(at_s * RATE)]) / RATE
        # The page's recording runs a block and a message behind what is played.
        last_s = np.flatnonzero(np.abs(recording) > 1e-5)[-1] / RATE
        cancelled = [event for event in await said(demo.page, "cancelled") if event["id"] == over + 1]
        if not cancelled:
            continue
        (event,) = cancelled
        error_ms = event["heardMs"] - (last_s - begun_s) * 1000
        print(f"heard {event['heardMs']} ms, recorded {(last_s - begun_s) * 1000:.0f} ms, error {error_ms:.0f} ms, behind it {after:.4f}")
        assert LINE.startswith(event["spokenText"]) and not event["spokenText"].endswith(" ")
        rest = LINE[len(event["spokenText"]) :]
        assert rest == "" or rest.startswith(" "), "heard text ends with a word"
        measured = all(event["measured"] for event in (await said(demo.page, "playback"))[2:])
        if after < 0.001 and abs(error_ms) <= HEARD_WITHIN_MS and measured:
            break
    assert cancelled, "it was not stopped"
    assert after < 0.001
    assert abs(error_ms) <= HEARD_WITHIN_MS
    assert measured


async def test_an_interruption_is_heard_and_what_it_interrupts_is_not(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    await note_events(demo.page)
    interrupt = 'vivavoce.session.append("Wait, I have news.", { interrupt: true }); vivavoce.session.end()'
    async for _ in demo.tries():
        done, over = await demo.count("done"), await demo.over()
        at_s = await speaking(demo, 900, interrupt)
        await demo.until_over(over + 2)
        await demo.until("done", done + 1)
        recording = await demo.recording()
        after = recording[round(at_s * RATE) :]
        begins_s = find(known, after) / RATE
        sounding = silence(after, SILENT_WITHIN_S, begins_s - 0.01)
        head = rms(after[max(0, round(begins_s * RATE)) :][: RATE // 5]) / rms(known[: RATE // 5])
        texts = [event["text"] for event in await said(demo.page, "done")][done:]
        print(f"the next begins {begins_s * 1000:.0f} ms after the interruption, its head at {head:.2f}, before it {sounding:.4f}")
        if sounding < 0.001 and head > 0.7 and begins_s < 1.0 and texts == ["Wait, I have news."]:
            break
    assert sounding < 0.001, "what was interrupted was heard again"
    assert head > 0.7, "the new one was muted at its start"
    assert begins_s < 1.0
    assert texts == ["Wait, I have news."]


async def test_cancelled_before_its_first_sound(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect(settles=False)
    await note_events(demo.page)
    await demo.clear_recording()
    await demo.page.evaluate("() => { vivavoce.session.append('Nobody hears this.'); vivavoce.session.end(); vivavoce.session.cancel(); }")
    await demo.page.wait_for_timeout(1500)
    assert silence(await demo.recording(), 0.0) < 0.001
    assert not await said(demo.page, "heard") and not await said(demo.page, "done")
    await demo.say("This is heard.")
    assert silence(await demo.recording(), 0.0) > AUDIBLE


async def test_cancelled_twice_and_long_after_it_is_over(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect(settles=False)
    await note_events(demo.page)
    async for _ in demo.tries():
        over = await demo.over()
        await speaking(demo, 600, "vivavoce.session.cancel(); vivavoce.session.cancel()")
        await demo.until_over(over + 1)
        if await said(demo.page, "cancelled"):
            break
    await demo.page.evaluate(CANCEL_AND_LOOK)
    cancelled, done = len(await said(demo.page, "cancelled")), len(await said(demo.page, "done"))
    assert cancelled == 1
    await demo.say("The next is whole.")
    await demo.page.wait_for_timeout(500)
    assert await demo.page.evaluate(CANCEL_AND_LOOK), "there was nothing to wait for"
    assert len(await said(demo.page, "cancelled")) == 1 and len(await said(demo.page, "done")) == done + 1


async def test_cancel_races_with_done(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal) -> None:
    """The page stops around the moment at which all has been sent: it is told either end, and is not left muted."""
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    await note_events(demo.page)
    length_ms = len(known) / RATE * 1000

    async def heard_from_its_start() -> bool:
        recording = await demo.recording()
        return rms(recording[max(0, find(known, recording)) :][: RATE // 5]) > 0.7 * rms(known[: RATE // 5])

    for early_ms in (-160, -90, -40, 20):
        async for _ in demo.tries():
            over = await demo.over()
            await speaking(demo, 0, "")
            await demo.page.evaluate(
                """(ms) => new Promise((resolve) => {
                  const { session } = vivavoce;
                  setTimeout(() => resolve(session.cancel()), session.tap.onsetAt + ms - performance.now());
                })""",
                length_ms - 80 - early_ms,
            )
            await demo.until_over(over + 1)
            await demo.page.wait_for_timeout(500)
            ends = [*await said(demo.page, "done"), *await said(demo.page, "cancelled")]
            print([(end["type"], end["state"], end["heardMs"]) for end in ends if end["id"] == over + 1])
            assert {end["id"] for end in ends} == set(range(1, over + 2))
            if whole := await heard_from_its_start():
                break
        assert whole
    async for _ in demo.tries():
        await demo.clear_recording()
        await demo.say("Still there.")
        if whole := await heard_from_its_start():
            break
    assert whole


async def test_a_guest_falls_silent_when_the_owner_cancels(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal) -> None:
    owner = await open_demo(wav_gateway.url)
    await owner.connect()
    await note_events(owner.page)
    guest = await open_demo(wav_gateway.url)
    await guest.page.evaluate(GUEST, await owner.page.evaluate("vivavoce.session.invitation"))
    await guest.page.wait_for_timeout(2000)
    for _ in range(TRIES):
        over = await owner.over()
        await guest.page.evaluate("recording.clear()")
        await owner.type(LINE)
        await owner.page.keyboard.press("Enter")
        await guest.page.wait_for_function(SOUNDS)
        await guest.page.wait_for_timeout(900)
        _, at_s = await asyncio.gather(owner.page.evaluate("vivavoce.session.cancel()"), guest.page.evaluate("recording.seconds"))
        await owner.until_over(over + 1)
        await guest.page.wait_for_timeout(500)
        recording = await samples(guest.page, "recording")
        last_s = np.flatnonzero(np.abs(recording) > 1e-5)[-1] / RATE
        begun_s = find(known, recording[: round(at_s * RATE)]) / RATE
        cancelled = [event for event in await said(owner.page, "cancelled") if event["id"] == over + 1]
        error_ms = cancelled[-1]["heardMs"] - (last_s - begun_s) * 1000 if cancelled else np.inf
        print(f"silent {(last_s - at_s) * 1000:.0f} ms after the cancel, error {error_ms:.0f} ms")
        if last_s - at_s < SILENT_WITHIN_S and abs(error_ms) <= HEARD_WITHIN_MS:
            break
    assert last_s - at_s < SILENT_WITHIN_S
    assert abs(error_ms) <= HEARD_WITHIN_MS
    await guest.page.evaluate("recording.clear()")
    await owner.type("And this is heard again.")
    await owner.page.keyboard.press("Enter")
    await guest.page.wait_for_function(SOUNDS)


async def test_a_paused_player_misses_nothing(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal) -> None:
    """Pause and play of the audio element: speech waits meanwhile, and what was on its way comes again."""
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    await note_events(demo.page)
    async for _ in demo.tries():
        done = await demo.count("done")
        at_s = await speaking(demo, 800, "speaker.pause()")
        await demo.page.wait_for_timeout(1500)
        recording = await demo.recording()
        before_s = at_s - find(known, recording[: round(at_s * RATE)]) / RATE
        went_on, ended = silence(recording, at_s + 0.4), len(await said(demo.page, "done")) > done
        await demo.clear_recording()
        await demo.page.evaluate("speaker.play()")
        await demo.until("done", done + 1)
        rest = await demo.recording()
        sounding = np.flatnonzero(np.abs(rest) > 1e-5)
        goes_on_s = (sounding[0] - find(known, rest)) / RATE if len(sounding) else np.inf
        print(f"paused at {before_s:.3f} s of the utterance, went on at {goes_on_s:.3f} s of it")
        # Until the gateway knows of the pause, a little is played to nobody; what is heard again began in an earlier packet.
        if went_on < 0.001 and not ended and -0.3 < goes_on_s - before_s < 0.06:
            break
    assert went_on < 0.001, "speech went on with nobody to hear it"
    assert not ended
    assert -0.3 < goes_on_s - before_s < 0.06


async def test_a_killed_tab_gives_up_its_place_and_another_hears_the_rest(open_demo: OpenDemo, long_gateway: Gateway) -> None:
    owner = await open_demo(long_gateway.url)
    await owner.connect(settles=False)
    await note_events(owner.page)
    invitation = await owner.page.evaluate("vivavoce.session.invitation")
    guest = await open_demo(long_gateway.url)
    await guest.page.evaluate(GUEST, invitation)
    await guest.page.wait_for_timeout(1000)
    # Long enough for a quarter of a minute: the engine stops a voice that says more than its text can last.
    text = " ".join([LINE] * 6)
    await owner.type(text, delay_ms=1)
    await owner.page.keyboard.press("Enter")
    await guest.page.wait_for_function(SOUNDS)
    await guest.page.wait_for_timeout(800)
    debugger = await guest.page.context.new_cdp_session(guest.page)
    crashed = asyncio.Event()
    guest.page.on("crash", lambda _: crashed.set())
    heard_ms = await guest.page.evaluate("performance.now() - begunAt")
    heard_at_s = time.monotonic()
    # It never answers.
    killed = asyncio.create_task(debugger.send("Page.crash"))
    await asyncio.wait_for(crashed.wait(), 60)
    dies_ms = (time.monotonic() - heard_at_s) * 1000
    await owner.page.wait_for_function("said.some(({ type, reason }) => type === 'done' && reason === 'unheard')")
    killed.cancel()
    await asyncio.wait([killed])
    left = (await said(owner.page, "done"))[0]
    print(f"heard {left['durationMs']} ms, {heard_ms:.0f} when it was killed, {left['text']!r}")
    assert -2500 < left["durationMs"] - heard_ms < 1500 + dies_ms, "what is sent for three seconds to one that is dead is not heard"
    assert text.startswith(left["text"])
    other = await open_demo(long_gateway.url)
    await other.page.evaluate(GUEST, invitation)
    await other.page.wait_for_function(SOUNDS)
    await other.page.wait_for_timeout(500)
    await owner.page.evaluate("vivavoce.session.cancel()")
    await owner.page.wait_for_function("said.some(({ type }) => type === 'cancelled')")
    rest = (await said(owner.page, "cancelled"))[0]
    assert (rest["id"], rest["text"]) == (2, text[len(left["text"]) :].strip())
