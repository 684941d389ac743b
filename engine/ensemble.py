"""Ensemble: the utterances of one engine, from their opening to their end, as clients command them: they wait for text and for room, are
admitted, and have a slot. It knows nothing of launches, which are EngineLoop's."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from engine.admission import Admission
from engine.config import EngineConfig
from engine.errors import EngineError, Overloaded, RequestRefused
from engine.guard import longest_s
from engine.messages import (
    PROTOCOL_VERSION,
    Append,
    Cancel,
    Command,
    Credit,
    Done,
    Event,
    Failed,
    Finish,
    Hello,
    Inspect,
    Open,
    Playback,
    Sampling,
    SpeechRequest,
    Started,
    Unwelcome,
    Welcome,
)
from engine.model.prompt import Prefix, Reference
from engine.model.text import LiveText
from engine.opening import Opening, Voice
from engine.playback import PlaybackClock
from engine.request import Utterance
from engine.resting import Resting
from engine.scheduler import Scheduler
from engine.stages.base import BaseStages
from engine.stalls import Stalls
from engine.tally import Tally

log = logging.getLogger(__name__)

Emit = Callable[[bytes, Event], None]
# So many utterances may be open without enough text for each one that may wait for room.
WRITERS = 16
# Weight of the latest utterance in the usual length of the silence before the first sound.
ONSET_SHARE = 0.1
# Seconds of speech a character usually takes.
USUAL_S = 0.07


class Ensemble:
    """What EngineLoop drives. `emit(client, event)` sends."""

    def __init__(self, stages: BaseStages, config: EngineConfig, emit: Emit) -> None:
        self.stages = stages
        self.config = config
        self.info = stages.info
        self.epoch = secrets.randbits(48) | 1
        self.scheduler = Scheduler(config, stages.costs, self.info.sample_rate, self.info.samples_per_frame)
        self.admission = Admission(self.scheduler)
        self.opening = Opening(stages, config)
        self._onset_s: float | None = None
        self._opened = 0
        """How many have taken a slot since the latest launch."""
        self._tally = Tally()
        self._emit = emit
        self._waiting: dict[tuple[bytes, int], Voice] = {}
        self._active: dict[tuple[bytes, int], Voice] = {}
        self._unheard: set[Utterance] = set()
        """Who has a slot and has not sounded."""
        self._resting = Resting(config.ahead_s)
        self._stalls = Stalls(config, self.scheduler, self.info.sample_rate)

    def handle(self, client: bytes, command: Command, now_s: float) -> None:
        """Obey one command. What cannot be obeyed is answered with `Failed`; commands for utterances that have ended do nothing."""
        if isinstance(command, Hello):
            if command.version == PROTOCOL_VERSION:
                self._emit(client, Welcome(self.epoch, self.stages.info))
            else:
                log.error("a client speaks protocol version %d, this engine %d", command.version, PROTOCOL_VERSION)
                self._emit(client, Unwelcome(PROTOCOL_VERSION))
            return
        if isinstance(command, Inspect):
            used = self.config.slots - self.stages.free_slots
            self._emit(client, self._tally.stats(self.epoch, self.config.slots, used, len(self._waiting), self.stages.costs))
            return
        if command.epoch != self.epoch:
            if isinstance(command, Open):
                self._emit(
                    client, Failed(command.epoch, command.utterance, "engine_unavailable", "the engine has restarted; open the utterance again", True)
                )
            return
        key = client, command.utterance
        if isinstance(command, Open):
            self._open(key, command, now_s)
            return
        voice = self._active.get(key) or self._waiting.get(key)
        if voice is None:
            return
        match command:
            case Append(text=text):
                self._append(key, voice, text, False, now_s)
            case Finish():
                self._append(key, voice, "", True, now_s)
            case Cancel():
                self._end(key, "cancelled")
            case Playback(heard=heard, playing=playing, measured=measured):
                self._resting.changed(voice.utterance)
                voice.utterance.playback.report(heard, playing, measured, now_s)
            case Credit(consumed=consumed):
                self._resting.changed(voice.utterance)
                voice.utterance.samples_consumed = max(voice.utterance.samples_consumed, consumed)

    def refuse(self, client: bytes, epoch: int, number: int, message: str) -> None:
        """A command that makes no sense fails the utterance it names."""
        key = client, number
        if epoch == self.epoch and (key in self._active or key in self._waiting):
            self._fail(key, RequestRefused(message))
        else:
            self._emit(client, Failed(epoch, number, RequestRefused.code, message, RequestRefused.retryable))

    def drop_client(self, client: bytes) -> None:
        """A client has gone: forget its utterances."""
        for key in self._of(client):
            self._forget(key)

    def give_up(self, client: bytes, error: EngineError) -> None:
        """A client has been silent for too long: fail its utterances."""
        for key in self._of(client):
            self._fail(key, error)

    def _of(self, client: bytes) -> list[tuple[bytes, int]]:
        return [key for key in (*self._active, *self._waiting) if key[0] == client]

    def open_tokens(
        self,
        number: int,
        prefix: Prefix,
        body: Prefix,
        sampling: Sampling,
        max_frames: int,
        now_s: float,
        *,
        reference: Reference | None = None,
        text: Sequence[int] = (),
        last: bool = False,
    ) -> Voice:
        """In-process opening by token ids, for `conform`: `text` is in hand, `last` says whole, and more follows through `feed_tokens`."""
        request = SpeechRequest(live=False, pace="file", sampling=sampling)
        utterance = Utterance(b"", number, request, PlaybackClock(self.info.sample_rate), max_frames, now_s)
        voice = Voice(utterance, LiveText(self.stages.checkpoint.tokenizer, live=False, rate=None), prefix, 0, [], body, reference)
        if not body:
            self.opening.begin_reference(voice)
        voice.tokens += text
        if last:
            voice.text.finish()
        self._active[b"", number] = voice
        self._take_slot(voice, may_end=True)
        return voice

    def feed_tokens(self, voice: Voice, tokens: list[int], *, last: bool) -> None:
        """More text tokens of an utterance opened by `open_tokens`."""
        voice.tokens += tokens
        self._write(voice, last)

    def _open(self, key: tuple[bytes, int], command: Open, now_s: float) -> None:
        client, number = key
        try:
            if key in self._active or key in self._waiting:
                raise RequestRefused(f"utterance: number {number} is in use")
            self._check_queue(now_s)
            voice = self.opening.voice(client, number, command.request, self._onset_s or 0.0, now_s)
        except EngineError as error:
            self._emit(client, Failed(self.epoch, number, error.code, str(error), error.retryable, error.retry_after_s))
            return
        self._waiting[key] = voice
        if command.text or command.finished:
            self._append(key, voice, command.text, command.finished, now_s)

    def _append(self, key: tuple[bytes, int], voice: Voice, text: str, last: bool, now_s: float) -> None:
        received = voice.text.received + len(text)
        if received > self.config.max_text_chars:
            what = f"text: {received} characters, an utterance may have {self.config.max_text_chars}; send it as several utterances"
            self._fail(key, RequestRefused(what, code="text_too_long"))
            return
        if text:
            voice.text.append(text, now_s)
            voice.longest_s += longest_s(text)
        if last:
            voice.text.finish()
        self._feed(voice)

    def _feed(self, voice: Voice) -> None:
        """Move tokens that have become safe towards the slot; a text that turns out to hold nothing to say is done."""
        if voice.text.full:
            voice.utterance.reason = "length"
        for token, until in voice.text.take():
            voice.tokens.append(token)
            voice.utterance.text_until.append(until)
        if voice.utterance.slot >= 0:
            self._write(voice, voice.text.finished)
        elif voice.text.finished and voice.text.blank:
            # What filled an utterance and cannot be said may still have words behind it.
            self._end((voice.utterance.client, voice.utterance.number), "length" if voice.text.full else "empty")

    def _write(self, voice: Voice, last: bool) -> None:
        u = voice.utterance
        self._resting.changed(u)
        fresh = list(voice.tokens)
        voice.tokens.clear()
        if last and not u.text_closed:
            fresh.append(self.stages.checkpoint.config.tts_eos)
            u.text_closed = True
            self.opening.cap(voice, u.text_issued + len(fresh))
        if fresh:
            self.stages.write_text(u.slot, u.text_issued, fresh)
            u.text_issued += len(fresh)

    def _admit(self, now_s: float) -> None:
        """Utterances with enough text to begin take free slots, live ones before downloads and the oldest first, as long as nobody's
        sound would break for it."""
        for key, voice in sorted(self._waiting.items(), key=lambda item: not item[1].utterance.live):
            if not voice.text.may_start(now_s, self.config.idle_flush_s, self.config.word_pause_s):
                continue
            if not voice.text.finished and voice.text.whole_in(now_s, self.config.word_pause_s) == 0.0:
                # One word and then nothing: it is all there will be of this utterance.
                voice.utterance.reason = "idle"
                voice.text.finish()
                self._feed(voice)
            if voice.ready_s is None:
                try:
                    self._check_queue(now_s)
                except Overloaded as error:
                    self._fail(key, error)
                    continue
                voice.ready_s = now_s
                # The forecast is to know what the prompt costs.
                voice.utterance.prefill_left = self.opening.prompt_pieces(voice)
            if self._has_room(voice, now_s):
                del self._waiting[key]
                self._active[key] = voice
                self._take_slot(voice, may_end=not voice.utterance.request.live)
                self._emit(key[0], Started(self.epoch, key[1]))
            elif now_s - voice.ready_s >= self.config.longest_wait_s:
                retry_s = self._frees_in(now_s)
                what = f"no room within {self.config.longest_wait_s:g} s beside {len(self._active)} utterances; try again in about {retry_s:.0f} s"
                self._fail(key, Overloaded(what, retry_after_s=retry_s))

    def _check_queue(self, now_s: float) -> None:
        """Raises Overloaded if as many wait for room as may, or far more for text: those take nothing but memory."""
        ready = sum(voice.ready_s is not None for voice in self._waiting.values())
        if ready >= self.config.waiting or len(self._waiting) >= WRITERS * self.config.waiting:
            retry_s = self._frees_in(now_s)
            raise Overloaded(f"{len(self._waiting)} utterances are waiting already; try again in about {retry_s:.0f} s", retry_after_s=retry_s)

    def _has_room(self, voice: Voice, now_s: float) -> bool:
        """A free slot, and no listener who would run dry for it."""
        if not self.admission.has_slot(self.stages.free_slots, voice.utterance):
            return False
        if self.admission.is_light(1 + len(self._active)):
            return True
        others = [other.utterance for other in self._active.values()]
        return self.admission.has_room(now_s, others, voice.utterance)

    def _frees_in(self, now_s: float) -> float:
        """Seconds until the first of those being spoken should have been said, by the length of their text."""
        left = [voice.text.received * USUAL_S - voice.utterance.frames_done * self.scheduler.frame_s for voice in self._active.values()]
        return min(30.0, max(1.0, min(left, default=1.0)))

    def _take_slot(self, voice: Voice, *, may_end: bool) -> None:
        u = voice.utterance
        self.opening.fill_prompt(voice)
        self._opened += 1
        u.slot, u.prefill_left = self.stages.begin(
            voice.prefix, u.request.sampling, voice.seed, may_end=may_end, body=voice.body, reference=voice.reference
        )
        self._resting.join(u)
        self._unheard.add(u)
        self._write(voice, voice.text.finished)
        self._stalls.join(voice)

    def _close_stalled(self, now_s: float) -> None:
        """A row about to run dry for want of text is spoken to its end."""
        for voice in self._stalls.overdue(now_s):
            voice.utterance.reason = "idle"
            voice.text.close()
            self._feed(voice)

    def _learn_onset(self, dropped_s: float) -> None:
        self._onset_s = dropped_s if self._onset_s is None else self._onset_s + ONSET_SHARE * (dropped_s - self._onset_s)

    def _is_active(self, voice: Voice) -> bool:
        """Whether it is this one that has a slot: its number may be another's by now."""
        return self._active.get((voice.utterance.client, voice.utterance.number)) is voice

    def _end(self, key: tuple[bytes, int], reason: str) -> None:
        voice = self._forget(key)
        until = voice.text.received
        if reason == "idle":
            until = voice.text.spoken_chars
        elif reason not in ("end", "empty", "cancelled") and not (reason == "length" and voice.text.full):
            until = voice.utterance.chars_eaten
        self._emit(key[0], Done(self.epoch, key[1], reason, voice.utterance.samples_emitted, until))

    def _fail(self, key: tuple[bytes, int], error: EngineError) -> None:
        self._forget(key)
        self._emit(key[0], Failed(self.epoch, key[1], error.code, str(error), error.retryable, error.retry_after_s))

    def _forget(self, key: tuple[bytes, int]) -> Voice:
        voice = self._active.pop(key, None)
        if voice is None:
            return self._waiting.pop(key)
        self._resting.leave(voice.utterance)
        self._unheard.discard(voice.utterance)
        self._stalls.leave(voice)
        self.stages.close(voice.utterance.slot)
        return voice
