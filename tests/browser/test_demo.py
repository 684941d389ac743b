"""The demo page beyond speaking: who writes, what interrupts, what is shown, and for whom."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.async_playwright import Axe

from tests.browser.chat_server import KEY, Chat, chat_server
from tests.browser.conftest import Gateway, OpenDemo, serving, tabs
from tests.browser.demo import PATIENCE_MS, WHEN_HEARD, Demo

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parents[1] / "tests/fixtures/checkpoints"
SCREENSHOTS = os.environ.get("VIVAVOCE_SCREENSHOTS")
LONG_LINE = "This line is long enough to be interrupted in the middle."
ANSWER = "Grüße! The bridge is open – it closes at noon. Ça va?"
PHONE = {"width": 360, "height": 740}
DESK = {"width": 760, "height": 900}
CONNECT_UNSEEN = """addEventListener("load", () => {
  new MutationObserver(() => console.log("told")).observe(document.getElementById("problem"), { attributes: true, attributeFilter: ["data-code"] });
  setTimeout(() => document.getElementById("connect").click(), 200);
})"""


@pytest.fixture
async def chat() -> AsyncIterator[Chat]:
    async with chat_server(Chat()) as server:
        yield server


@pytest.fixture
async def open_strict(tmp_path: Path) -> AsyncIterator[OpenDemo]:
    """Under the page's content security policy."""
    async with tabs(tmp_path / "strict", bypass_csp=False) as open_one:
        yield open_one


async def ask(demo: Demo, chat: Chat, question: str, *, key: str = KEY) -> None:
    page = demo.page
    await page.evaluate("() => { document.getElementById('author').open = true; }")
    for field, value in {"base": chat.url, "model": "parrot", "key": key, "question": question}.items():
        await page.fill(f"#chat-{field}", value)
    await page.keyboard.press("Enter")


async def said(demo: Demo) -> list[str]:
    """What each utterance said, in speaking order."""
    texts: list[str] = await demo.page.evaluate("[...vivavoce.session.utterances.values()].map(({ text }) => text)")
    return texts


async def idle(demo: Demo) -> None:
    """Wait until there is nothing to stop. A selector, for a policy may forbid functions."""
    await demo.page.wait_for_selector("#stop:disabled")


def words(texts: list[str]) -> str:
    return " ".join(" ".join(texts).split())


# What is typed


async def test_a_hand_is_held_to_its_clauses_and_a_fast_sender_is_not(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    pieces: list[list[Any]] = await demo.page.evaluate(
        """async () => {
          const { Holder } = await import("/holder.js");
          const sent = [];
          const type = (text, everyMs) => {
            const holder = new Holder();
            const mine = [];
            sent.push(mine);
            holder.onclause = (text, complete) => mine.push([text, complete]);
            [...text].forEach((letter, i) => holder.type(letter, 1000 + i * everyMs));
            holder.release(false);
          };
          type("The harbour was quiet, and dark. Yes, we saw it", 100);
          type("港は静かだった。灯りは消えた、一つずつ。", 200);
          type("version 3.5 is out", 100);
          type("quick fingers are not held", 30);
          const pasting = new Holder();
          sent.push([]);
          pasting.onclause = (text, complete) => sent.at(-1).push([text, complete]);
          pasting.type("two words", 1000);
          return sent;
        }"""
    )
    clauses, japanese, number, fast, pasted = pieces
    assert clauses == [["The harbour was quiet, ", True], ["and dark. Yes, ", True], ["we saw it", False]]
    assert [piece[0] for piece in japanese] == ["港は静かだった。灯りは消えた、", "一つずつ。"]
    assert number == [["version 3.5 is out", False]]
    assert fast[0][0] == "quic" and [piece[0] for piece in fast[1:]] == list("k fingers are not held")
    assert pasted == [["two words", False]]


async def test_what_is_typed_is_spoken_when_its_clause_or_the_hand_stops(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect(settles=False)
    # A hand that is held up in mid-clause makes two of it.
    await demo.type("The harbour was quiet, ", delay_ms=100)
    await idle(demo)
    assert words(await said(demo)) == "The harbour was quiet,"
    await demo.type("and nobody spoke ", delay_ms=100)
    await idle(demo)
    assert words(await said(demo)) == "The harbour was quiet, and nobody spoke"
    # The box has let go of what was said, without any Enter, and there is nothing to stop.
    assert await demo.page.input_value("#line") == ""
    assert await demo.page.is_disabled("#stop")
    await demo.type("Alone", delay_ms=100)
    await idle(demo)
    assert words(await said(demo)) == "The harbour was quiet, and nobody spoke Alone"
    await demo.type("And")
    assert await demo.page.input_value("#line") == "And" and await demo.page.is_enabled("#stop")
    await demo.page.keyboard.press("Escape")
    assert await demo.page.input_value("#line") == "" and await demo.page.is_disabled("#stop")


async def test_text_of_which_nothing_is_spoken_is_told_and_let_go(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    page = demo.page
    await demo.connect(settles=False)

    async def told() -> str:
        await idle(demo)
        assert await page.input_value("#line") == "" and await demo.count("pending") == 0
        return " ".join(await page.locator("#utterances li").first.locator("p, small").all_inner_texts())

    await demo.type("**\U0001f389**")
    await page.keyboard.press("Enter")
    await demo.until("empty", 1)
    assert await told() == "**\U0001f389** Nothing to speak in it"
    # Pasted: it goes as it is, and nobody presses Enter.
    await page.keyboard.insert_text("\U0001f389 \U0001f38a")
    await demo.until("empty", 2)
    assert await told() == "\U0001f389 \U0001f38a Nothing to speak in it"
    # Behind speech, and before more of it.
    await demo.type("Here is some.")
    await page.keyboard.press("Enter")
    await demo.type("\U0001f44d")
    await page.keyboard.press("Enter")
    await demo.type("And here more.")
    await page.keyboard.press("Enter")
    await demo.until("done", 2)
    await idle(demo)
    states = await page.locator("#utterances li").evaluate_all("(rows) => rows.map((row) => row.dataset.state)")
    assert states == ["done", "empty", "done", "empty", "empty"]
    assert words(await said(demo)) == "Here is some. And here more."
    # Code that is open, in a text of its own.
    await page.keyboard.insert_text("```py")
    await page.keyboard.press("Enter")
    await demo.until("empty", 4)
    await demo.type("Still there.")
    await page.keyboard.press("Enter")
    await demo.until("done", 3)


async def test_a_language_the_voice_does_not_speak_is_told(gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(gateway.url)
    hint = demo.page.locator("#hint")
    await demo.connect(settles=False)
    await demo.type("Das ist nicht der Weg. ")
    await hint.filter(has_text="German, which the voice does not speak. It knows English").wait_for()
    await demo.page.keyboard.press("Escape")
    await demo.type("This is the way. ")
    await demo.page.wait_for_selector("#hint:empty", state="attached")
    await demo.page.keyboard.press("Escape")
    examples = {
        "Il fait nuit et nous avons froid": "french",
        "それは本です": "japanese",
        "这是一本书": "chinese",
        "Это книга": "russian",
        "Hola, ¿cómo está el perro?": "spanish",
        "Che cosa è questo?": "italian",
        "Isso é muito bom, mas não para você": "portuguese",
        "שלום": "another",
        "OK": None,
    }
    guesses = await demo.page.evaluate(
        """async (texts) => {
          const { seemingLanguage } = await import("/languages.js");
          return Object.fromEntries(texts.map((text) => [text, seemingLanguage(text)]));
        }""",
        list(examples),
    )
    assert guesses == examples


# Voices


async def test_voices_are_offered_before_connecting_and_instructions_where_they_are_taken(tmp_path: Path, open_demo: OpenDemo) -> None:
    with serving(tmp_path, "--model", str(CHECKPOINTS / "cv17")) as gateway:
        demo = await open_demo(gateway.url)
        page = demo.page
        await page.wait_for_selector("#instructions")
        voices = await page.locator("#voice option").all_inner_texts()
        assert len(voices) > 1
        await page.select_option("#voice", label=voices[1])
        await page.fill("#instructions", "Whisper.")
        sent: list[dict[str, Any]] = []
        page.on("websocket", lambda socket: socket.on("framesent", lambda payload: sent.append(json.loads(payload))))
        await page.click("#connect")
        await page.wait_for_selector("body[data-state=ready]")
        assert (sent[0]["type"], sent[0]["instructions"]) == ("session.update", "Whisper.")
        assert await page.evaluate("vivavoce.session.voice") == await page.input_value("#voice") == sent[0]["voice"]
        await page.fill("#instructions", "Sing.")
        await page.keyboard.press("Tab")
        await page.select_option("#language", index=1)
        await page.wait_for_function("vivavoce.session.language === document.getElementById('language').value")
        assert [event["instructions"] for event in sent if "instructions" in event] == ["Whisper.", "Sing."]
        assert await page.is_hidden("#problem")


async def test_instructions_are_not_offered_where_they_do_nothing(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.page.wait_for_selector("#voice:enabled")
    assert await demo.page.is_hidden("#instructions")


# Language models


async def test_the_simulator_writes_and_can_be_stopped(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect(settles=False)
    page = demo.page
    await page.click("#author summary")
    await page.fill("#sim-text", "Left at the mill, then straight on. It is not far.")
    await page.fill("#sim-rate", "40")
    await page.click("#sim-write")
    assert await page.is_enabled("#stop")
    await idle(demo)
    assert words(await said(demo)) == "Left at the mill, then straight on. It is not far."
    tokens = page.locator("#events li b", has_text=re.compile("^text$"))
    assert await tokens.count() >= 12, "it did not come in tokens"

    await page.fill("#sim-pause", "30")
    await page.click("#sim-write")
    await demo.until_heard()
    await page.keyboard.press("Escape")
    await idle(demo)
    count = await tokens.count()
    await page.wait_for_timeout(300)
    assert await tokens.count() == count, "it writes on"


async def test_a_chat_answer_is_spoken_as_it_streams_under_the_policy(wav_gateway: Gateway, open_strict: OpenDemo, chat: Chat) -> None:
    demo = await open_strict(wav_gateway.url)
    page = demo.page
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    await page.click("#connect")
    await page.wait_for_selector("body[data-state=ready]")
    chat.answer = ANSWER
    await ask(demo, chat, "Is the bridge open?")
    await idle(demo)
    assert words(await said(demo)) == ANSWER
    question = chat.asked[0]
    assert (question["stream"], question["model"], question["messages"][-1]) == (True, "parrot", {"role": "user", "content": "Is the bridge open?"})

    chat.answer = "Good."
    await ask(demo, chat, "Thanks.")
    await idle(demo)
    assert [message["content"] for message in chat.asked[1]["messages"][1:]] == ["Is the bridge open?", ANSWER, "Thanks."]

    kept = await page.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, location.href, history.state])")
    assert KEY not in kept and KEY not in await page.inner_html("body")
    await page.reload()
    assert await page.input_value("#chat-key") == ""
    assert complaints == []
    # Later, for while a debugger evaluates anything is allowed.
    evaluated = "new Promise((tell) => setTimeout(() => { try { tell(eval('1')); } catch { tell('refused'); } }))"
    assert await page.evaluate(evaluated) == "refused", "no policy is in force"


async def test_a_stopped_answer_is_remembered_as_far_as_it_was_heard(wav_gateway: Gateway, open_demo: OpenDemo, chat: Chat) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect(settles=False)
    chat.answer, chat.stalls = "The way is long, so let me tell you about all of it. First there is a bridge.", True
    # Asked with Enter, too.
    await demo.page.evaluate(WHEN_HEARD, [1000, "document.getElementById('stop').click()"])
    await ask(demo, chat, "Which way?")
    await demo.until("cancelled", 1)
    await asyncio.wait_for(chat.hung_up.wait(), 10)
    heard = (await demo.page.inner_text("li[data-state=cancelled] mark")).strip()
    assert heard and chat.answer.startswith(heard) and heard != chat.answer

    chat.answer, chat.stalls = "Briefly: left.", False
    await ask(demo, chat, "Shorter, please.")
    await demo.until("done", 1)
    assert [message["content"] for message in chat.asked[1]["messages"][1:]] == ["Which way?", f"{heard} …", "Shorter, please."]


async def test_what_goes_wrong_with_a_chat_is_told(wav_gateway: Gateway, open_demo: OpenDemo, chat: Chat) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect(settles=False)
    await ask(demo, chat, "Hello?", key="wrong")
    assert "(401): this key is unknown Check the key." in await demo.problem()
    chat.cors = False
    await ask(demo, chat, "Hello?")
    await demo.page.locator("#problem", has_text="CORS").wait_for()
    chat.url = "nonsense"
    await demo.page.evaluate("() => { document.getElementById('chat-base').type = 'text'; }")
    await ask(demo, chat, "Hello?")
    await demo.page.locator("#problem", has_text="not a URL").wait_for()
    # Nothing of that ended the session.
    await demo.page.focus("#line")
    await demo.say("Still here.")


# Interrupting, hearing


def voice_after(path: Path, quiet_s: float) -> Path:
    """A room's hiss, then something as loud as a voice beside it."""
    rate = 48000
    hiss = np.random.default_rng(1).normal(0, 0.001, round(rate * (quiet_s + 1.5)))
    at = np.arange(round(rate * 1.5)) / rate
    hiss[-len(at) :] += 0.2 * np.sin(2 * np.pi * 180 * at) * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * at))
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(np.round(hiss * 32767).astype("<i2").tobytes())
    return path


async def test_speaking_up_interrupts_if_it_was_asked_to(wav_gateway: Gateway, tmp_path: Path) -> None:
    sound = voice_after(tmp_path / "voice.wav", 6)
    flags = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={sound}")
    async with tabs(tmp_path / "profile", *flags) as open_demo:
        demo = await open_demo(wav_gateway.url)
        page = demo.page
        await demo.connect(settles=False)
        assert await page.evaluate("vivavoce.microphone.on") is False
        await demo.say("Nobody is listening in.")
        await page.click("#microphone")
        await page.wait_for_selector("#microphone[aria-pressed=true]")
        await page.focus("#line")
        # Whoever listens hears nobody for six seconds, then somebody.
        for _ in range(6):
            if await demo.count("cancelled"):
                break
            await demo.type(LONG_LINE)
            await page.keyboard.press("Enter")
            # It may have been interrupted before it is seen to speak.
            await idle(demo)
        await demo.until("cancelled", 1)
        events = await page.locator("#events li").all_text_contents()
        assert any("somebody speaks up" in event for event in events)
        assert await page.evaluate("vivavoce.session.tap.heardAt - vivavoce.session.tap.audibleAt") > 0
        await page.click("#microphone")
        await page.wait_for_selector("#microphone[aria-pressed=false]")
        assert await page.evaluate("vivavoce.microphone.on") is False
        await page.focus("#line")
        await demo.say("Nobody is listening in any more.")


async def test_no_microphone_is_told(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.page.click("#microphone")
    assert "no microphone" in await demo.problem()
    assert await demo.page.get_attribute("#microphone", "aria-pressed") == "false"


async def test_a_browser_that_refuses_to_play_is_tapped(wav_gateway: Gateway, tmp_path: Path) -> None:
    async with tabs(tmp_path / "profile", "--autoplay-policy=user-gesture-required", autoplay=False) as open_demo:
        demo = await open_demo("about:blank")
        # Playwright's own looks at the page count as gestures: the page has to connect before the first of them, and says itself when it has.
        await demo.page.add_init_script(CONNECT_UNSEEN)
        async with demo.page.expect_console_message(lambda message: message.text == "told", timeout=PATIENCE_MS):
            await demo.page.goto(wav_gateway.url)
        assert "does not let this page play" in await demo.problem()
        assert await demo.page.evaluate("document.getElementById('speaker').paused")
        await demo.page.click("text=Tap to hear")
        await demo.page.wait_for_function("!document.getElementById('speaker').paused")
        assert await demo.page.is_hidden("#problem")
        await demo.page.focus("#line")
        await demo.say("Now it is heard.")


def engine_of(gateway: Gateway) -> int:
    """The process that makes its speech."""
    pid = gateway.process.pid
    (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(engine)


async def test_the_banner_of_a_lost_engine_goes_when_speech_is_back(tmp_path: Path, open_demo: OpenDemo) -> None:
    with serving(tmp_path) as gateway:
        demo = await open_demo(gateway.url)
        await demo.connect(settles=False)
        # Far more than the engine makes ahead: there is speech to lose, however late it is lost.
        await demo.type(" ".join([LONG_LINE] * 6), delay_ms=1)
        await demo.page.keyboard.press("Enter")
        await demo.until_heard()
        os.kill(engine_of(gateway), signal.SIGKILL)
        await demo.problem()
        await idle(demo)
        for _ in range(60):
            if (await demo.page.request.get(f"{gateway.url}/ready")).ok:
                break
            await asyncio.sleep(0.5)
        await demo.type("Back again.")
        await demo.page.keyboard.press("Enter")
        await demo.page.wait_for_selector("#problem", state="hidden")
        await demo.until("done", 2)


# What is shown


async def test_the_picture_follows_the_utterance(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.connect()
    await demo.type(LONG_LINE)
    await demo.page.keyboard.press("Enter")
    picture = demo.page.locator("li[data-state=speaking] svg.picture")
    await picture.locator("path.dry[d^=M]").wait_for(state="attached")
    before = await picture.locator("path.heard").get_attribute("d")
    await demo.until("done", 1)
    picture = demo.page.locator("li[data-state=done] svg.picture")
    names = ("text", "heard", "sent", "made", "first", "dry", "dryIn", "bufferArea")
    shape = {name: await picture.locator(f"path.{name}").get_attribute("d") or "" for name in names}
    assert shape["heard"] != before and shape["heard"].count("L") > 5
    assert shape["text"].count("M") > 1 and shape["first"] and shape["bufferArea"], shape
    assert not shape["dry"], "it is over"

    def ends(line: str) -> list[float]:
        """Where each of a line's points is, from the top."""
        return [float(point.split(",")[1]) for point in re.findall(r"[\d.]+,[\d.]+", line)]

    heard, sent, made = ends(shape["heard"]), ends(shape["sent"]), ends(shape["made"])
    assert heard == sorted(heard, reverse=True), "what has been heard is taken back"
    # Further up is more: all that is heard was sent, all that was sent was made, and in between more was made than heard.
    assert all(m <= s <= h for m, s, h in zip(made, sent, heard, strict=True)) and made[len(made) // 2] < heard[len(heard) // 2]
    label = await picture.get_attribute("aria-label") or ""
    assert "First sound after" in label and re.search(r"The buffer held \d+ to \d+ ms", label) and "underrun" in label
    figures = await demo.page.inner_text("#figures")
    assert re.match(r"First sound after \d+ ms · \w+ underruns? · listener’s buffer \d+ ms · positions measured$", figures), figures
    log = await demo.page.locator("#events li b").all_text_contents()
    assert log[0] == "done" and {"connecting", "ready", "text", "started", "heard"} <= set(log)


# For whom


def luminance(colour: str) -> float:
    """WCAG's, of an opaque colour."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour)]
    assert len(numbers) == 3, f"{colour} is not opaque"
    channels = [value / 255 for value in numbers]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


async def show_everything(demo: Demo) -> None:
    """An utterance heard, one stopped and one waiting, a problem, a hint, all that can be opened open."""
    page = demo.page
    await demo.connect(settles=False)
    await demo.say("One is heard.")
    await demo.speak(LONG_LINE, 0, "document.getElementById('stop').click()")
    await demo.until("cancelled", 1)
    await page.evaluate("""() => {
      for (const details of document.querySelectorAll("details")) details.open = true;
      for (const hidden of document.querySelectorAll("[hidden]")) hidden.hidden = false;
      document.getElementById("hint").textContent = "A hint.";
      document.getElementById("problem-message").textContent = "A problem.";
      document.getElementById("problem-remedy").textContent = "What to do.";
      document.getElementById("microphone").setAttribute("aria-pressed", "true");
    }""")
    await demo.type(LONG_LINE)
    await page.keyboard.press("Enter")
    await page.wait_for_selector("li[data-state=speaking] mark:not(:empty)")


async def test_colours_tell_apart_and_axe_finds_nothing(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    script = (HERE / "contrast.js").read_text().split("\n", 1)[1]
    await show_everything(demo)
    for scheme in ("light", "dark"):
        await demo.page.emulate_media(color_scheme=scheme)
        pairs: list[tuple[str, str, str, float]] = await demo.page.evaluate(script)
        assert len(pairs) > 60
        faint = {(what, round(contrast(one, other), 2)) for what, one, other, wanted in pairs if contrast(one, other) < wanted}
        assert faint == set(), scheme
        found = await Axe().run(demo.page)
        assert [(fault["id"], [node["target"] for node in fault["nodes"]]) for fault in found.response["violations"]] == [], scheme


async def test_the_keyboard_reaches_everything_and_shows_where_it_is(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    page = demo.page
    await page.wait_for_selector("#voice:enabled")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.id") == "connect"
    await page.keyboard.press("Enter")
    await page.wait_for_selector("body[data-state=ready]")
    await page.wait_for_function("document.activeElement.id === 'line'")
    await page.evaluate("() => { for (const details of document.querySelectorAll('details')) details.open = true; }")
    reached: list[str] = []
    for _ in range(40):
        focus: dict[str, Any] = await page.evaluate("""() => {
          const focused = document.activeElement;
          const { outlineWidth, outlineStyle } = getComputedStyle(focused);
          return { id: focused.id || focused.textContent, outline: outlineStyle === "none" ? 0 : parseFloat(outlineWidth) };
        }""")
        if focus["id"] in reached:
            break
        reached.append(focus["id"])
        assert focus["outline"] >= 2, focus
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement === document.body"):
            await page.keyboard.press("Tab")
    wanted = {"connect", "voice", "language", "line", "microphone", "sim-text", "sim-rate", "sim-pause", "sim-write"}
    assert wanted | {"chat-base", "chat-model", "chat-key", "chat-question", "chat-ask", "events"} <= set(reached)

    # Escape stops from anywhere.
    await page.focus("#line")
    await demo.type(LONG_LINE)
    await page.keyboard.press("Enter")
    await demo.until_heard()
    await page.focus("#chat-model")
    await page.keyboard.press("Escape")
    await demo.until("cancelled", 1)
    assert await page.evaluate("document.activeElement.id") == "chat-model"


async def test_a_phone_shows_it_all_and_nothing_moves_for_who_wants_none(wav_gateway: Gateway, open_demo: OpenDemo) -> None:
    demo = await open_demo(wav_gateway.url)
    await demo.page.set_viewport_size(PHONE)
    await show_everything(demo)
    assert await demo.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    small = await demo.page.evaluate("""() => [...document.querySelectorAll("button, input, select, summary")]
      .filter((control) => control.checkVisibility() && control.getBoundingClientRect().height < 24).map((control) => control.outerHTML)""")
    assert small == []
    running = "document.getAnimations().filter(({ playState }) => playState === 'running').length"
    await demo.page.evaluate("() => { document.body.dataset.state = 'connecting'; }")
    assert await demo.page.evaluate(running) == 1
    await demo.page.emulate_media(reduced_motion="reduce")
    assert await demo.page.evaluate(running) == 0


async def test_screenshots(gateway: Gateway, open_demo: OpenDemo, tmp_path: Path) -> None:
    """`make screenshots` puts them into docs/."""
    folder = Path(SCREENSHOTS) if SCREENSHOTS else tmp_path
    demo = await open_demo(gateway.url)
    page = demo.page
    await page.set_viewport_size(DESK)
    await demo.connect()
    await page.evaluate("document.getElementById('sim-write').click()")
    await demo.until_heard()
    await page.wait_for_timeout(4000)
    await page.screenshot(path=folder / "demo-light.png", full_page=True)
    await page.emulate_media(color_scheme="dark")
    await page.screenshot(path=folder / "demo-dark.png", full_page=True)
    await page.emulate_media(color_scheme="light")
    await page.set_viewport_size(PHONE)
    await page.wait_for_timeout(300)
    await page.screenshot(path=folder / "demo-phone.png", full_page=True)
    for name in ("light", "dark", "phone"):
        assert 10_000 < (folder / f"demo-{name}.png").stat().st_size < 150_000
