"""The page's manners: stopping, leaving, coming back, typing, and errors in words."""

from __future__ import annotations

import numpy as np
import pytest

from tests.browser.conftest import Gateway, OpenDemo
from tests.browser.matching import RATE, Signal, find, match, rms

SILENT_WITHIN_S = 0.1
SLEEP = """(sleepsMs) => {
  const getStats = RTCRtpReceiver.prototype.getStats;
  let from;
  window.looks = { asleep: 0, awake: 0 };
  const before = (report) => ({ ...report, totalSamplesDuration: Math.min(report.totalSamplesDuration, 0.01) });
  RTCRtpReceiver.prototype.getStats = async function () {
    const stats = await getStats.call(this);
    from ??= performance.now();
    const awake = performance.now() - from > sleepsMs;
    looks[awake ? "awake" : "asleep"]++;
    if (awake) return stats;
    return new Map([...stats].map(([id, report]) => [id, report.type === "inbound-rtp" ? before(report) : report]));
  };
}"""
"""As an output that has slept: it has taken one piece of 10 ms by now. From the first look at it on; it counts them."""
READY = """() => {
  window.ready = new Promise((resolve) => {
    const look = new MutationObserver(() => {
      if (document.body.dataset.state !== "ready") return;
      look.disconnect();
      resolve({ ...looks, playsMs: performance.now() - window.playsFrom });
    });
    look.observe(document.body, { attributes: true });
    document.getElementById("speaker").addEventListener("play", () => (window.playsFrom ??= performance.now()));
  });
}"""
COLD_MS = 2000
LONG_LINE = "This line is long enough to be stopped in the middle."


async def test_stop_silences_at_once_and_shows_what_was_heard(wav_gateway: Gateway, open_demo: OpenDemo, known: Signal) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    async for _ in demo.tries():
        over = await demo.over()
        await demo.clear_recording()
        stopped_at_s = await demo.speak(LONG_LINE, 1000, "document.getElementById('stop').click()")
        await demo.until_over(over + 1)
        await demo.page.wait_for_timeout(800)
        recording = await demo.recording()
        at = round(stopped_at_s * RATE)
        before, after = rms(recording[at - RATE // 2 : at]), np.abs(recording[at + round(SILENT_WITHIN_S * RATE) :]).max()
        heard, unheard = [await demo.page.locator("#utterances li").first.locator(part).inner_text() for part in ("mark", "span")]
        if before > 0.01 and after < 0.001 and heard and unheard:
            break
    assert before > 0.01 and after < 0.001
    assert heard and unheard and heard + unheard == LONG_LINE
    assert "Stopped, heard" in await demo.page.locator("#utterances li").first.locator("small").inner_text()

    async for _ in demo.tries():
        await demo.clear_recording()
        await demo.say("The next one is heard.")
        recording = await demo.recording()
        first = recording[max(0, find(known, recording)) :][: RATE // 5]
        if rms(first) > 0.7 * rms(known[: RATE // 5]):
            break
    assert rms(first) > 0.7 * rms(known[: RATE // 5]), "the next utterance is still muted at its start"


@pytest.mark.parametrize("sleeps_ms", [900, 60_000])
async def test_it_is_ready_when_its_output_plays_or_has_had_two_seconds(
    wav_gateway: Gateway, open_demo: OpenDemo, known: Signal, sleeps_ms: int
) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.page.evaluate(SLEEP, sleeps_ms)
    await demo.page.evaluate(READY)
    await demo.connect(settles=False)
    ready = await demo.page.evaluate("ready")
    print(ready)
    assert ready["asleep"] and (ready["awake"] or ready["playsMs"] >= COLD_MS - 20), "it did not wait"
    # One look that differs, of some in the 50 ms for which a browser says the same. Who goes on waiting looks a hundred times.
    assert ready["awake"] < 20, "it waited for longer than its output slept"
    async for recording in demo.attempts("Said at once."):
        found = match(known, recording)
        if not found.problems():
            break
    assert found.problems() == []


async def test_given_up_while_its_output_wakes_it_does_not_become_ready(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.page.evaluate(SLEEP, 60_000)
    await demo.page.click("#connect")
    await demo.page.wait_for_function("document.getElementById('speaker').currentTime > 0")
    await demo.page.click("#connect")
    await demo.page.wait_for_timeout(2500)
    assert await demo.page.get_attribute("body", "data-state") == "closed"
    assert await demo.page.locator("#problem").is_hidden()


async def test_what_waits_for_a_paused_player_waits_for_its_output_too(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    await demo.page.evaluate("speaker.pause()")
    await demo.page.wait_for_timeout(500)
    await demo.type("Not heard yet.", delay_ms=1)
    await demo.page.keyboard.press("Enter")
    await demo.page.evaluate(SLEEP, 1000)
    await demo.page.evaluate("() => { vivavoce.session.on('heard', () => (window.heardWhen = { ...looks })); speaker.play(); }")
    await demo.until("done", 1)
    heard_when = await demo.page.evaluate("heardWhen")
    assert heard_when["asleep"] and heard_when["awake"], "it was heard while its output slept"


async def test_a_page_closed_in_mid_speech_leaves_nothing_behind(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect(settles=False)
    await demo.type(LONG_LINE)
    await demo.page.keyboard.press("Enter")
    await demo.until_heard()
    await demo.page.close()

    after = await open_demo(wav_gateway.url)
    await after.connect(settles=False)
    await after.say("Back again.")
    assert rms(await after.recording()) > 0.01
    assert await after.count("done") == 1


async def test_a_second_listener_replaces_the_first(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    owner = await open_demo(wav_gateway.url)
    await owner.connect(settles=False)
    invitation = await owner.page.evaluate("vivavoce.session.invitation")
    guest = await open_demo(wav_gateway.url)
    await guest.page.evaluate(
        """async ({ whep, token }) => {
          const { Listener } = await import("/listener.js");
          const { Tap } = await import("/tap.js");
          const listener = new Listener(document.getElementById("speaker"));
          window.tap = new Tap();
          await listener.prepare();
          await listener.connect(whep, token, AbortSignal.timeout(10_000));
          await tap.attach(listener.stream);
        }""",
        invitation,
    )
    assert "another listener has taken over" in await owner.problem()
    await owner.clear_recording()
    await owner.type("Who hears this?")
    await owner.page.keyboard.press("Enter")
    await guest.page.wait_for_function("tap.onsetAt > 0")
    await owner.page.wait_for_selector("li[data-state=done]")
    assert np.abs(await owner.recording()).max() < 0.001


async def test_leaving_asks_for_nothing_that_is_gone(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    refused: list[str] = []
    demo.page.on("response", lambda response: refused.append(f"{response.status} {response.url}") if response.status >= 400 else None)
    for _ in range(4):
        await demo.connect(settles=False)
        await demo.page.click("#connect")
        await demo.page.wait_for_selector("body[data-state=closed]")
        await demo.page.wait_for_timeout(300)
    assert refused == []


async def test_an_unknown_voice_is_answered_with_those_there_are(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(f"{wav_gateway.url}/?voice=nobody")
    await demo.page.click("#connect")
    problem = await demo.problem()
    assert "nobody" in problem and "the checkpoint has: " in problem
    await demo.page.goto(wav_gateway.url)
    await demo.connect(settles=False)


async def test_a_gateway_that_goes_away_is_an_error_in_words(brief_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(brief_gateway.url)
    await demo.connect(settles=False)
    brief_gateway.stop()
    assert "connection to the gateway was lost" in await demo.problem()
    await demo.page.click("#connect")
    await demo.page.wait_for_selector("#problem[data-code=gateway-unreachable]")
    assert "Start it with" in await demo.problem()


async def test_the_line_only_grows(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect(settles=False)
    page = demo.page
    await page.evaluate("() => { window.sent = []; vivavoce.line.ontext = (text) => sent.push(text); }")
    await demo.type("Hi")
    await page.keyboard.press("Backspace")
    await page.keyboard.press("Control+a")
    await page.keyboard.press("Delete")
    await page.keyboard.press("Home")
    await page.keyboard.type("!")
    await page.keyboard.press("Home")
    await page.evaluate("""() => {
      const pasted = new DataTransfer();
      pasted.setData("text/plain", " two\\nlines ");
      line.dispatchEvent(new InputEvent("beforeinput", { inputType: "insertFromPaste", dataTransfer: pasted, cancelable: true }));
    }""")
    keyboard = await page.context.new_cdp_session(page)
    for composed in ("に", "にほ", "にほん"):
        await keyboard.send("Input.imeSetComposition", {"text": composed, "selectionStart": len(composed), "selectionEnd": len(composed)})
    assert await page.evaluate("sent") == ["H", "i", "!", " two lines "]
    await keyboard.send("Input.insertText", {"text": "日本"})
    assert await page.evaluate("sent") == ["H", "i", "!", " two lines ", "日本"]
    assert await page.input_value("#line") == "Hi! two lines 日本"
