"""Strand: utterances that follow each other. A session has one, or with the policy `mix` one for each text.

The engine makes one utterance of a strand at a time; the next begins when the engine is done with it, and its audio queues behind, so that
no gap arises."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

from engine import WENT_WRONG, AudioChunk, Done, EngineError, EngineUtterance, Started
from gateway.events import Error
from gateway.logs import UTTERANCE
from gateway.media.line import Line
from gateway.media.tap import Tap
from gateway.script import Script
from gateway.utterance import Utterance

log = logging.getLogger(__name__)


class Stage(Protocol):
    """What a strand needs of its session."""

    ident: str

    @property
    def line(self) -> Line:
        """Where audio goes."""

    @property
    def heard(self) -> bool:
        """Whether there is somebody to hear what is made."""

    def begins(self, utterance: Utterance) -> None:
        """Number it: it is being made from now on."""

    def open_engine(self, utterance: Utterance) -> EngineUtterance:
        """An utterance of the engine's for it. Raises EngineError."""

    def tap(self, utterance: Utterance) -> Tap | None:
        """What keeps a copy of its audio, if anything is to."""

    def followed(self, utterance: Utterance, following: Utterance | None) -> None:
        """It takes no more text; what is written of it from now on belongs to `following`, if there is one."""

    def failed(self, error: Error) -> None:
        """Tell the client."""

    def audio_sent(self, number: int, now_s: float) -> None:
        """See LineEvents."""

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` for as long as the session lasts."""


class Strand:
    """Its utterances from the first letter until they are heard."""

    def __init__(self, stage: Stage) -> None:
        self.waiting: deque[Utterance] = deque()
        """Not begun by the engine."""
        self.live: list[Utterance] = []
        """Begun by the engine and not heard to the end."""
        self.making: Utterance | None = None
        self._maker: asyncio.Task[None] | None = None
        self._last: int | None = None
        """Begun before the one that is begun next."""
        self._stage = stage

    @property
    def busy(self) -> bool:
        """Whether something of it is to be spoken or heard."""
        return bool(self.waiting or self.live)

    def make_next(self) -> None:
        """Give the engine the next utterance, if it is free and there is one. Text with nobody to hear it waits here: in the
        engine it would hold a place that others need."""
        if self._maker is not None or not self.waiting or (self.waiting[0].blank and not self.waiting[0].complete) or not self._stage.heard:
            return
        utterance = self.making = self.waiting.popleft()
        self._stage.begins(utterance)
        self._stage.line.begin(utterance.number, self._last)
        self._last = utterance.number
        self.live.append(utterance)
        self._maker = self._stage.own(self._make(utterance), f"make-{self._stage.ident}-{utterance.number}")

    def stop(self) -> None:
        """Make no more of the utterance that is being made."""
        if self._maker is not None:
            self._maker.cancel()
        self.making = self._maker = None

    def carry_over(self, utterance: Utterance, left: Script | None) -> None:
        """The engine is done with `utterance`; text it left unspoken begins the next one."""
        following = None
        if left is not None:
            following = Utterance(left, utterance.settings, utterance.last_text_s)
            following.complete = utterance.complete
            self.waiting.appendleft(following)
        self._stage.followed(utterance, following)

    async def _make(self, utterance: Utterance) -> None:
        UTTERANCE.set(utterance.number)
        stage = self._stage
        try:
            try:
                await self._speak(utterance)
            except EngineError as error:
                self._fail(utterance, Error(error.code, str(error), error.retryable, utterance.number))
            await stage.line.end(utterance.number)
        except Exception:
            # A defect of ours must not end the session in silence.
            log.exception("session %s: utterance %d failed", stage.ident, utterance.number)
            now_s = time.monotonic()
            stage.line.drop({utterance.number}, now_s)
            self._fail(utterance, Error("internal_error", "the utterance failed inside the gateway", True, utterance.number))
            stage.audio_sent(utterance.number, now_s)
        self.making = self._maker = None
        self.make_next()

    async def _speak(self, utterance: Utterance) -> None:
        if utterance.blank:
            utterance.reason = "empty"
            return
        stage = self._stage
        engine = stage.open_engine(utterance)
        utterance.begin(engine)
        begun_s = time.monotonic()
        tap = stage.tap(utterance)
        async for event in engine:
            match event:
                case Started():
                    utterance.speakable_s = max(utterance.last_text_s, begun_s)
                case AudioChunk():
                    utterance.chunk(event)
                    if tap is not None:
                        tap.add(event.pcm)
                    await stage.line.write(utterance.number, event.pcm)
                case Done():
                    if event.reason in WENT_WRONG:
                        what = f"the voice went wrong ({event.reason}) and was stopped; the last words of this utterance may not have been said"
                        stage.failed(Error("speech_broken_off", f"{what}; send them again", True, utterance.number))
                    self.carry_over(utterance, utterance.done(event))
        if tap is not None:
            await asyncio.to_thread(tap.save)

    def _fail(self, utterance: Utterance, error: Error) -> None:
        utterance.reason = "error"
        self._stage.followed(utterance, None)
        self._stage.failed(error)
