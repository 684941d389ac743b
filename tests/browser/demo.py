"""The demo page, as a test uses it: through its buttons and its text field, and its own recorder."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass, field

import numpy as np
from playwright.async_api import Page

from tests.browser.matching import Signal, resample

PATIENCE_MS = 20_000
SETTLES_MS = 2_000


@dataclass
class Demo:
    """One tab with the page in it."""

    page: Page
    faults: list[str] = field(default_factory=list)
    """Uncaught errors of the page's scripts."""

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.set_default_timeout(PATIENCE_MS)

    async def connect(self) -> None:
        """Press Connect, wait until the page says that it is, and as long again as a hand needs to reach the keyboard.

        For its first second or so a receiver averages its buffer up from nothing and may stretch what it plays meanwhile."""
        await self.page.click("#connect")
        await self.page.wait_for_selector("body[data-state=ready]")
        await self.page.wait_for_timeout(SETTLES_MS)

    async def type(self, text: str, *, delay_ms: float = 15.0) -> None:
        """One key after the other."""
        await self.page.locator("#line").press_sequentially(text, delay=delay_ms)

    async def say(self, text: str) -> None:
        """Type, press Enter, and wait until all of it has been heard."""
        before = await self.count("done")
        await self.type(text)
        await self.page.keyboard.press("Enter")
        await self.until("done", before + 1)

    async def count(self, state: str) -> int:
        """How many utterances are in this state."""
        return await self.page.locator(f"#utterances li[data-state={state}]").count()

    async def until(self, state: str, count: int) -> None:
        """Wait for that many utterances in this state, and for the last one's sound to have ended."""
        await self.page.wait_for_function(
            "([state, count]) => document.querySelectorAll(`#utterances li[data-state=${state}]`).length >= count", arg=[state, count]
        )
        if state == "done":
            await self.page.wait_for_function("performance.now() - vivavoce.session.tap.audibleAt > 300")

    async def until_heard(self) -> None:
        """Wait for a sound after quiet."""
        await self.page.wait_for_function("performance.now() - vivavoce.session.tap.audibleAt < 50")

    async def problem(self) -> str:
        """The error the page shows, once it shows one."""
        await self.page.wait_for_selector("#problem:not([hidden])")
        return (await self.page.inner_text("#problem p")).strip()

    async def first_sounds_ms(self) -> list[float]:
        """From each utterance's first letter to its first audible sample, as the page measured it."""
        times: list[float] = await self.page.evaluate("[...vivavoce.session.utterances.values()].map((utterance) => utterance.ttfaMs)")
        return times

    async def concealed(self) -> int:
        """Samples of sound the receiver has had to make up, because none had come in time."""
        counters: dict[str, int] = await self.page.evaluate("vivavoce.session.stats()")
        return counters["concealedSamples"] - counters["silentConcealedSamples"]

    async def clear_recording(self) -> None:
        await self.page.evaluate("vivavoce.recorder.clear()")

    async def recording(self) -> Signal:
        """What was played since the recorder was cleared, from the file that the page's button saves."""
        async with self.page.expect_download() as saving:
            await self.page.click("#save")
        path = await (await saving.value).path()
        with wave.open(io.BytesIO(path.read_bytes())) as file:
            return resample(np.frombuffer(file.readframes(file.getnframes()), "<i2"), file.getframerate())
