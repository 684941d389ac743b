"""Session: text in, utterances one after another or at once, audio out, barge-in. Everything here runs on the event loop; only `_report`
waits, and the strands' making."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from concurrent.futures import Executor
from typing import Any, Protocol

from engine import EngineError, EngineUtterance, SpeechRequest
from gateway.config import GatewayConfig
from gateway.events import (
    Cancel,
    ClientEvent,
    Error,
    EventError,
    Ping,
    Playback,
    Played,
    Pong,
    ServerEvent,
    SessionUpdate,
    TextAppend,
    TextEnd,
    TextFlush,
    UtteranceCancelled,
    UtteranceDone,
    UtteranceProgress,
    UtteranceStarted,
)
from gateway.filter import TextFilter, Verbatim
from gateway.media.line import Line, OpusLine
from gateway.media.opus import RATE
from gateway.media.pcm import AudioSocket, PcmLine
from gateway.media.tap import Tap
from gateway.pool import EnginePool
from gateway.rtc.peer import Peer
from gateway.script import Script
from gateway.sender import TextRate
from gateway.settings import Settings
from gateway.strand import Strand
from gateway.surrogates import Halves
from gateway.text import Cleaner
from gateway.utterance import Utterance

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.2
LAST_MOMENT_S = 0.1
FADES_S = 0.25
"""After an utterance has counted as heard: its last moment, and what of it is still on its way to an ear."""


class Socket(AudioSocket, Protocol):
    """The client's side of a session."""

    def event(self, event: ServerEvent) -> None:
        """Queue an event for the client."""

    def hang_up(self) -> None:
        """Close the client's connection, for the gateway is stopping."""

    def away_for(self, now_s: float) -> float:
        """Seconds for which the client has had no connection, 0 while it has one."""


class Session:
    """One client's conversation. Feed it events with `handle`, end it with `close`; it answers on its socket."""

    def __init__(self, ident: str, token: str, config: GatewayConfig, engines: EnginePool, socket: Socket, encoders: Executor) -> None:
        self.ident = ident
        self.token = token
        self.media = OpusLine(self, encoders, config.awake_s)
        self.listener: Peer | None = None
        self.closed = False
        self._config = config
        self._engines = engines
        self._socket = socket
        self._pcm = PcmLine(self, socket)
        self.line: Line = self._pcm
        self._settings: Settings | None = None
        self._rate = TextRate()
        self._halves = Halves()
        self._filter: TextFilter | None = None
        """Of the text being written, which may go on in further utterances; None before it and after its end."""
        self._count = 0
        self._over_s = float("-inf")
        """When an utterance last counted as heard, or was stopped."""
        self._measured: bool | None = None
        """What was said last of how the listener's playback is known."""
        self._open: Utterance | None = None
        """Takes text now."""
        self._strand = Strand(self)
        """The one that text goes to."""
        self._strands = [self._strand]
        self._tasks: set[asyncio.Task[None]] = set()
        self._sounding = asyncio.Event()
        self.own(self._report(), f"report-{ident}")

    # Events from the client

    def handle(self, event: ClientEvent) -> None:
        """Act on one event. What cannot be done is answered with `error`."""
        try:
            self._act(event, time.monotonic())
        except EventError as error:
            self._answer(error.event())
        except EngineError as error:
            self._answer(Error(error.code, str(error), error.retryable))

    def _act(self, event: ClientEvent, now_s: float) -> None:
        match event:
            case TextAppend(text, interrupt):
                if interrupt:
                    self._cancel(None, now_s)
                self._append(text, now_s)
            case TextFlush():
                self._finish()
            case TextEnd():
                self._finish()
                self._filter = None
            case Cancel(utterance):
                self._cancel(utterance, now_s)
            case SessionUpdate():
                self._update(event)
            case Played(utterance, played_ms, buffered_ms):
                self._played(utterance, played_ms / 1000, buffered_ms / 1000, now_s)
            case Ping():
                self._socket.event(Pong())

    def _update(self, update: SessionUpdate) -> None:
        settings = (self._settings or Settings.initial(self._engines.info)).updated(update, self._engines.info, self._config.max_append_chars)
        line: Line = self.media if settings.audio.format == "webrtc" else self._pcm
        mixes = settings.policy == "mix"
        if line is not self.line or mixes is not (self._settings is not None and self._settings.policy == "mix"):
            if any(strand.waiting for strand in self._strands) or any(not utterance.sent for utterance in self._live):
                what = "the audio format, and whether utterances mix, can change only while nothing is being spoken; wait for utterance.done"
                raise EventError("session_busy", what, retryable=True)
            for utterance in self._live:
                self._forget(utterance)
            self.media.mix(mixes)
        self.line, self._settings = line, settings
        self._answer(settings.event(self._engines.info))

    def _played(self, number: int, played_s: float, buffered_s: float, now_s: float) -> None:
        if self.line is not self._pcm:
            raise EventError("not_allowed", "playback: a WebRTC listener reports on its data channel; this is for audio.format pcm_s16le")
        if number > self._count:
            raise EventError("invalid_event", f"playback: utterance: none has the number {number} yet; they count from 1")
        self._pcm.playout.report(number, round(played_s * RATE), buffered_s, now_s)
        for utterance in self._live:
            self._tell_engine(utterance, now_s)

    @property
    def refuses_listeners(self) -> bool:
        """Whether one that comes while another is there has to go."""
        return self._settings is not None and self._settings.listeners == "refuse"

    def _configured(self) -> Settings:
        if self._settings is None:
            raise EventError("session_not_configured", "send session.update before any text")
        return self._settings

    def _append(self, text: str, now_s: float) -> None:
        settings = self._configured()
        if text and self._filter is None and settings.policy == "replace":
            self._cancel(None, now_s)
        text, left_out = self._halves.join(text)
        self._report_half(left_out)
        if not text:
            return
        if len(text) > self._config.max_append_chars:
            what = f"text: one text.append may carry {self._config.max_append_chars} characters, this has {len(text)}; send it in pieces"
            raise EventError("text_too_long", what)
        limit = min(self._config.max_utterance_chars, self._engines.info.max_text_chars)
        if len(text) + (len(self._open.text) if self._open else 0) > limit:
            raise EventError("text_too_long", f"text: an utterance may have {limit} characters; send text.end to begin the next")
        if self._open is None:
            self._begin(settings, now_s)
        assert self._open is not None
        self.media.rouse(now_s)
        self._rate.append(self._open.append(text, now_s), now_s)
        self._make_next()

    def _begin(self, settings: Settings, now_s: float) -> None:
        """Open an utterance for text. Raises EventError."""
        if settings.policy == "mix" and self._filter is None and self._strand.busy:
            if len(self._strands) >= self._config.max_mixed_texts:
                what = f"{len(self._strands)} texts sound or wait already; wait for utterance.done, or raise max_mixed_texts"
                raise EventError("too_many_utterances", what, retryable=True)
            self._strand = Strand(self)
            self._strands.append(self._strand)
        if len(self._strand.waiting) >= self._config.max_waiting_utterances:
            raise EventError("too_many_utterances", f"{len(self._strand.waiting)} utterances are waiting already", retryable=True)
        self._open = Utterance(Script(self._text_filter(settings)), settings, now_s)
        self._strand.waiting.append(self._open)

    def _text_filter(self, settings: Settings) -> TextFilter:
        kind = Cleaner if settings.text.clean else Verbatim
        if not isinstance(self._filter, kind):
            self._filter = kind()
        return self._filter

    def _report_half(self, half: str) -> None:
        if half:
            what = f"text: {half!a} is half of a surrogate pair whose other half was not beside it; it was left out, the rest is spoken"
            self._answer(Error("invalid_text", f"{what}; cut text between characters", False))

    def _finish(self) -> None:
        self._configured()
        self._report_half(self._halves.drop())
        if self._open is not None:
            self._open.finish()
            self._open = None
            self._make_next()

    def _cancel(self, first: int | None, now_s: float) -> None:
        strands = self._strands
        if first is not None and self._configured().policy == "mix":
            # Of what sounds at once, one text alone.
            strands = [strand for strand in strands if any(utterance.number == first for utterance in strand.live)]
        first = first or 1
        doomed = [utterance for strand in strands for utterance in strand.live if utterance.number >= first and not self._heard_out(utterance, now_s)]
        if not doomed and first > 1:
            return
        if self._strand in strands:
            if self._open is not None and (self._open.number == 0 or self._open in doomed):
                self._open = None
            if self._open is None:
                self._filter = None
                self._halves.drop()
        for strand in strands:
            strand.waiting.clear()
            if strand.making in doomed:
                strand.stop()
        if not doomed:
            return
        heard = {utterance.number: self.line.playout.heard(utterance.number, now_s) for utterance in doomed}
        self.line.drop(heard.keys(), now_s)
        for utterance in doomed:
            if utterance.engine is not None:
                utterance.engine.cancel()
            self._forget(utterance)
            samples = heard[utterance.number]
            text = utterance.text[: utterance.heard_chars(samples)]
            measured, until = self.line.playout.measured(now_s), self.line.rtp_until
            self._tell(UtteranceCancelled(utterance.number, _ms(samples), text, measured, until))

    def _leave_unheard(self, strand: Strand) -> None:
        """Nobody listens any more, so the engine's place is for others. What was not heard is made again for whoever comes."""
        utterance = strand.making
        if utterance is None or utterance.engine is None or utterance.reason is not None:
            return
        log.info("session %s: utterance %d has nobody to hear it", self.ident, utterance.number)
        now_s = time.monotonic()
        strand.stop()
        utterance.engine.cancel()
        heard = self.line.playout.heard(utterance.number, now_s)
        self.line.drop({utterance.number}, now_s)
        strand.carry_over(utterance, utterance.leave(heard))
        self._forget(utterance)
        if utterance.started:
            self._tell(UtteranceDone(utterance.number, "unheard", _ms(heard), utterance.text))
        elif utterance.number == self._count:
            self._count -= 1

    def _make_next(self) -> None:
        for strand in list(self._strands):
            strand.make_next()

    # From the strands (gateway.strand.Stage)

    @property
    def heard(self) -> bool:
        """See Stage."""
        return self.line is not self.media or (self.media.attached and not self._deserted(time.monotonic()))

    def begins(self, utterance: Utterance) -> None:
        """See Stage."""
        self._count += 1
        utterance.number = self._count
        self._sounding.set()

    def open_engine(self, utterance: Utterance) -> EngineUtterance:
        """See Stage."""
        settings = utterance.settings
        rate = self._rate.chars_per_s
        return self._engines.open(SpeechRequest(settings.voice, settings.language, settings.instructions, pace=settings.audio.pace, text_rate=rate))

    def tap(self, utterance: Utterance) -> Tap | None:
        """See Stage."""
        return Tap(self._config.tap, self.ident, utterance.number) if self._config.tap else None

    def followed(self, utterance: Utterance, following: Utterance | None) -> None:
        """See Stage."""
        if self._open is utterance:
            self._open = following

    def failed(self, error: Error) -> None:
        """See Stage."""
        self._answer(error)

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See Stage."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    # From the line (gateway.media.line.LineEvents)

    def audio_started(self, number: int, now_s: float, rtp_time: int | None) -> None:
        """See LineEvents."""
        for utterance in self._live:
            if utterance.number == number and not utterance.started:
                utterance.started = True
                self._tell(UtteranceStarted(number, round((now_s - utterance.speakable_s) * 1000, 1), rtp_time))
                self._tell_engine(utterance, now_s)

    def audio_sent(self, number: int, now_s: float) -> None:
        """See LineEvents."""
        for utterance in self._live:
            if utterance.number == number:
                utterance.sent = True
                self._tell(UtteranceDone(number, utterance.reason or "error", _ms(utterance.samples), utterance.text))

    def listener_came(self) -> None:
        """See LineEvents."""
        self._make_next()

    async def _report(self) -> None:
        """Tell the engine and the client how far the listener is, while there is something to hear."""
        while True:
            await self._sounding.wait()
            await asyncio.sleep(REPORT_EVERY_S)
            now_s = time.monotonic()
            if self._deserted(now_s):
                for strand in self._strands:
                    self._leave_unheard(strand)
            self._tell_playback(now_s)
            for utterance in self._live:
                heard = self._tell_engine(utterance, now_s)
                if utterance.sent:
                    if self._heard_out(utterance, now_s):
                        self._forget(utterance)
                elif heard > utterance.progress:
                    utterance.progress = heard
                    self._tell(UtteranceProgress(utterance.number, _ms(heard), utterance.heard_chars(heard)))
            if not self._live:
                self._sounding.clear()

    def _tell_engine(self, utterance: Utterance, now_s: float) -> int:
        playout = self.line.playout
        heard = playout.heard(utterance.number, now_s)
        if utterance.engine is not None:
            utterance.engine.playback(heard, playout.playing(utterance.number, now_s), playout.measured(now_s))
        return heard

    def _tell_playback(self, now_s: float) -> None:
        """What the listener has in hand of the utterance it hears."""
        speaking = next((utterance for utterance in self._live if utterance.started and not self._heard_out(utterance, now_s)), None)
        if speaking is None:
            return
        playout = self.line.playout
        buffered_s = playout.buffered_s(now_s)
        measured = playout.measured(now_s)
        if measured is not self._measured:
            self._measured = measured
            log.info("session %s: playback is %s", self.ident, "measured by the listener's reports" if measured else "estimated: no reports")
        concealed_s = self.listener.feedback.concealed_s if self.listener is not None and self.line is self.media else 0.0
        dry_in_s = playout.unplayed_s(now_s) + self.line.queued_s
        self._tell(Playback(speaking.number, round(buffered_s * 1000), round(dry_in_s * 1000), round(concealed_s * 1000), measured))

    def _answer(self, event: ServerEvent) -> None:
        """Tell the owner, by the data channel as well if that is who listens."""
        self._socket.event(event)
        if self.listener is not None and self.listener.owns:
            self.listener.event(event)

    def _tell(self, event: ServerEvent) -> None:
        """To the client, and to whoever listens."""
        self._socket.event(event)
        if self.listener is not None and self.line is self.media:
            self.listener.event(event)

    def _deserted(self, now_s: float) -> bool:
        """Whether there has been nobody to hear for too long."""
        return self.line is self.media and self.media.unheard_for(now_s) >= self._config.unheard_s

    def _heard_out(self, utterance: Utterance, now_s: float) -> bool:
        """Whether it is over for its listener too, but for a last moment on the way."""
        playout = self.line.playout
        left = utterance.samples - playout.heard(utterance.number, now_s)
        return utterance.sent and (left <= LAST_MOMENT_S * RATE or playout.dry(now_s))

    @property
    def _live(self) -> list[Utterance]:
        """Begun by the engine and not heard to the end."""
        return [utterance for strand in self._strands for utterance in strand.live]

    def _forget(self, utterance: Utterance) -> None:
        for strand in self._strands:
            if utterance in strand.live:
                strand.live.remove(utterance)
        self._strands = [strand for strand in self._strands if strand.busy or strand is self._strand]
        self.line.playout.forget(utterance.number)
        self._over_s = time.monotonic()

    # Lifetime

    @property
    def busy(self) -> bool:
        """Whether something is being spoken, or waits to be."""
        return any(strand.busy for strand in self._strands)

    @property
    def speaking(self) -> bool:
        """Whether something is being made or heard. Text that waits, for a listener or for its own next word, is neither."""
        return bool(self._live)

    def silent(self, now_s: float) -> bool:
        """Whether there is nothing to wait for: nothing more to be spoken, and what was spoken has been heard to its last sample."""
        return not self.busy and now_s - self._over_s >= FADES_S

    def hang_up(self) -> None:
        """Ask the client to go, for the gateway is stopping."""
        self._socket.hang_up()

    def end_unheard(self, now_s: float) -> None:
        """The gateway is stopping: with nobody there to hear what is still to be spoken, it ends here."""
        left = any(strand.waiting for strand in self._strands) or any(not self._heard_out(utterance, now_s) for utterance in self._live)
        if left and self._alone(now_s):
            for strand in self._strands:
                self._leave_unheard(strand)
            self._cancel(None, now_s)
            what = "the gateway is stopping, and nobody is there to hear the text that is left; it will not be spoken"
            self._answer(Error("draining", f"{what}; send it again to another one, or in a moment", True))

    def _alone(self, now_s: float) -> bool:
        """Whether nobody is there to hear: not for `unheard_s`, or not yet."""
        if self.line is self.media:
            return self._deserted(now_s) or not (self.media.attached or self._live)
        return self._socket.away_for(now_s) >= self._config.unheard_s

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("session %s: %s ended with an error", self.ident, task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Cancel what is being spoken and let the listener go. All of it is under way before the first wait."""
        self.closed = True
        for utterance in self._live:
            if utterance.engine is not None:
                utterance.engine.cancel()
        for strand in self._strands:
            strand.waiting.clear()
        if self.listener is not None:
            self.listener.dismiss()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.listener is not None:
            await self.listener.close()


def _ms(samples: int) -> int:
    return round(samples * 1000 / RATE)
