"""The demo page, as a test uses it: through its buttons and its text field, and its own recorder."""

from __future__ import annotations

import asyncio
import io
import logging
import wave
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from playwright.async_api import Page

from tests.browser.matching import Signal, resample, without_gaps
from tests.stalls import StallWatch

PATIENCE_MS = 60_000
SETTLES_MS = 2_000
RETRIES = 12
MOST_STRETCHES = 2
STOOD_STILL_MS = 60.0
"""Of the page's process; see STOOD_BACK_MS for its sound."""
STOOD_BACK_MS = 20.0
STALLS = Path(__file__).with_name("stalls.js").read_text()

log = logging.getLogger(__name__)


GREET = """async ([text, afterMs]) => {
  document.querySelector("#connect").click();
  const ready = () => document.body.dataset.state === "ready";
  while (!ready()) await new Promise((resolve) => setTimeout(resolve, 1));
  if (afterMs) await new Promise((resolve) => setTimeout(resolve, afterMs));
  vivavoce.session.append(text);
  vivavoce.session.end();
}"""


# All in the page, from the moment of Enter on: what else stands still meanwhile does not let the speech go by. A timer's turn comes behind the
# messages that came before it, so what had been played by then is in the recording.
WHEN_HEARD = """([forMs, act]) => {
  const { recorder, session } = vivavoce;
  const turn = () => new Promise((resolve) => setTimeout(resolve, 5));
  const run = async () => {
    while (session.tap.heardAt - session.tap.audibleAt >= 50) await turn();
    const from = recorder.seconds;
    while ((recorder.seconds - from) * 1000 < forMs) await turn();
    const at = recorder.seconds;
    eval(act);
    return at;
  };
  window.acted = new Promise((resolve) => {
    const onkey = ({ key }) => {
      if (key !== "Enter") return;
      removeEventListener("keydown", onkey);
      resolve(run());
    };
    addEventListener("keydown", onkey);
  });
}"""


@dataclass
class Demo:
    """One tab with the page in it."""

    page: Page
    watch: StallWatch
    faults: list[str] = field(default_factory=list)
    """Uncaught errors of the page's scripts."""
    _concealed: int = 0
    _stretches_left: int = MOST_STRETCHES

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.set_default_timeout(PATIENCE_MS)

    async def connect(self, *, settles: bool = True) -> None:
        """Press Connect, wait until the page says that it is, and as long again as a hand needs to reach the keyboard.

        For its first second or so a receiver averages its buffer up from nothing and may stretch what it plays meanwhile: to whom that does
        not matter, it need not have settled."""
        await self.page.click("#connect")
        await self.page.wait_for_selector("body[data-state=ready]")
        await self._forget()
        if settles:
            await self.page.wait_for_timeout(SETTLES_MS)
        self._concealed = await self.concealed()

    async def type(self, text: str, *, delay_ms: float = 15.0) -> None:
        """One key after the other."""
        await self.page.locator("#line").press_sequentially(text, delay=delay_ms)

    async def say(self, text: str) -> None:
        """Type, press Enter, and wait until all of it has been heard."""
        before = await self.count("done")
        await self.type(text)
        await self.page.keyboard.press("Enter")
        await self.until("done", before + 1)

    async def begin(self, text: str, for_ms: float) -> None:
        """Type, press Enter, listen for so long, stop it, and wait until that has been answered."""
        over = await self.over()
        await self.speak(text, for_ms, "document.querySelector('#stop').click()", delay_ms=1)
        await self.until_over(over + 1)
        await self.page.wait_for_timeout(150)

    async def speak(self, text: str, for_ms: float = 0.0, act: str = "", *, delay_ms: float = 15.0) -> float:
        """Type, press Enter, listen until it is heard and for so long, and run a script in the page. Returns where the page's recording was then,
        in seconds."""
        await self.page.evaluate(WHEN_HEARD, [for_ms, act])
        await self.type(text, delay_ms=delay_ms)
        await self.page.keyboard.press("Enter")
        at_s: float = await asyncio.wait_for(self.page.evaluate("acted"), PATIENCE_MS / 1000)
        return at_s

    async def over(self) -> int:
        """How many utterances have come to either end."""
        return await self.count("done") + await self.count("cancelled")

    async def until_over(self, count: int) -> None:
        """Wait for that many. One that was to be stopped may have been done by then."""
        await self.page.wait_for_function(
            "(count) => document.querySelectorAll('#utterances :is(li[data-state=done], li[data-state=cancelled])').length >= count", arg=count
        )

    async def count(self, state: str) -> int:
        """How many utterances are in this state."""
        return await self.page.locator(f"#utterances li[data-state={state}]").count()

    async def until(self, state: str, count: int) -> None:
        """Wait for that many utterances in this state, and for the last one's sound to have ended."""
        await self.page.wait_for_function(
            "([state, count]) => document.querySelectorAll(`#utterances li[data-state=${state}]`).length >= count", arg=[state, count]
        )
        if state == "done":
            # By the sound's own clock: after the page has stood still there is sound to come, however late it is.
            await self.page.wait_for_function("vivavoce.session.tap.heardAt - vivavoce.session.tap.audibleAt > 300")

    async def until_heard(self) -> None:
        """Wait for a sound after quiet. By the sound's own clock: once its output was late it stays behind the page's for seconds."""
        await self.page.wait_for_function("vivavoce.session.tap.heardAt - vivavoce.session.tap.audibleAt < 50")

    async def problem(self) -> str:
        """The error the page shows, once it shows one."""
        await self.page.wait_for_selector("#problem:not([hidden])")
        return (await self.page.inner_text("#problem p")).strip()

    async def first_sounds_ms(self) -> list[float]:
        """From each utterance's first letter to its first audible sample, as the page measured it."""
        times: list[float] = await self.page.evaluate("[...vivavoce.session.utterances.values()].map((utterance) => utterance.ttfaMs)")
        return times

    async def concealed(self) -> int:
        """Samples the receiver has had to make up, because none had come in time."""
        return (await self._counters())["concealedSamples"]

    async def attempts(self, text: str, for_ms: float | None = None) -> AsyncIterator[Signal]:
        """`say`, or `begin` for so long, and the recording of it. To whom that is not good enough it is said again, RETRIES times at most, if
        the receiver ran dry or this machine stood still meanwhile: such a recording tells nothing about the product. A receiver takes
        seconds of speech to get over it, so it is said to a new one. Twice in a test the receiver may also have stretched the sound for no
        reason that is seen here: one process alone can be late."""
        for _ in range(1 + RETRIES):
            if await self._disturbed():
                log.warning("the machine or the receiver stood still: connecting anew to say %r", text)
                await self.page.click("#connect")
                await self.page.wait_for_selector("body[data-state=closed]")
                await self.connect()
            await self.clear_recording()
            stretched = await self._stretched()
            await (self.say(text) if for_ms is None else self.begin(text, for_ms))
            yield await self.recording()
            if await self._disturbed():
                continue
            if not self._stretches_left or await self._stretched() == stretched:
                return
            self._stretches_left -= 1

    async def greetings(self, text: str, after_ms: int) -> AsyncIterator[Signal]:
        """Connect, say `text` so long after the page says that it is, as a program does, and the recording of it. To whom that is not good
        enough it is said again on a new connection, as by `attempts`."""
        for _ in range(1 + RETRIES):
            if await self.page.get_attribute("body", "data-state") == "ready":
                await self.page.click("#connect")
                await self.page.wait_for_selector("body[data-state=closed]")
            before = await self.count("done")
            self.watch.reset()
            await self.page.evaluate("standstill.reset()")
            self._concealed = 0
            await self.page.evaluate(GREET, [text, after_ms])
            await self.until("done", before + 1)
            yield await self.recording()
            if await self._disturbed(sound=False):
                continue
            if not self._stretches_left or not await self._stretched():
                return
            self._stretches_left -= 1

    async def tries(self) -> AsyncIterator[None]:
        """Once, and to whom that was not good enough again, RETRIES times at most, if the receiver ran dry, or this machine, the page's process
        or its sound stood still meanwhile."""
        for _ in range(1 + RETRIES):
            await self._forget()
            yield
            if not await self._disturbed():
                return
            log.warning("the machine, the browser or the receiver stood still: once more")

    async def _forget(self) -> None:
        self.watch.reset()
        await self.page.evaluate("standstill.reset()")
        self._concealed = await self.concealed()

    async def _disturbed(self, *, sound: bool = True) -> bool:
        """`sound`: its context counts, which may be late by itself when it is new."""
        stood = await self.page.evaluate("standstill()")
        if stood["process"] > STOOD_STILL_MS or (sound and stood["context"] > STOOD_BACK_MS):
            return True
        return self.watch.stalled or await self.concealed() > self._concealed

    async def _stretched(self) -> int:
        counters = await self._counters()
        return counters["insertedSamplesForDeceleration"] + counters["removedSamplesForAcceleration"]

    async def _counters(self) -> Counter[str]:
        counters: dict[str, int] | None = await self.page.evaluate("vivavoce.session.stats()")
        return Counter(counters)

    async def clear_recording(self) -> None:
        await self.page.evaluate("vivavoce.recorder.clear()")

    async def recording(self) -> Signal:
        """What was played since the recorder was cleared, from the file that the page's button saves."""
        async with self.page.expect_download() as saving:
            await self.page.click("#save")
        path = await (await saving.value).path()
        with wave.open(io.BytesIO(path.read_bytes())) as file:
            recorded = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            return resample(without_gaps(recorded, file.getframerate()), file.getframerate())
