"""EngineLoop: take commands, admit, pick, launch, retire. One thread owns it; time comes in as `now_s`."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
from numpy.typing import NDArray

from engine.admission import FULL_FOR_S, Admission
from engine.config import EngineConfig
from engine.errors import DeviceLost, EngineError, Overloaded, RequestRefused, UtteranceFailed
from engine.flight import Flight, TraceEntry
from engine.guard import longest_s
from engine.messages import (
    PROTOCOL_VERSION,
    Append,
    AudioChunk,
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
from engine.scheduler import Launch, Scheduler, Stage
from engine.stages.base import BaseStages
from engine.stalls import Stalls
from engine.tally import Tally

log = logging.getLogger(__name__)

Samples = NDArray[np.int16]
Emit = Callable[[bytes, Event], None]
# So many utterances may be open without enough text for each one that may wait for room.
WRITERS = 16
# As long as the silence that is trimmed may be, and a few more.
REHEARSAL_FRAMES = 8
# Weight of the latest utterance in the usual length of the silence before the first sound.
ONSET_SHARE = 0.1
# Weight of the latest launch in what a launch usually takes the host.
HOST_SHARE = 0.05
# So many rows of the Talker go on to the Code Predictor without another look, even if somebody new waits.
PAIRED_ROWS = 64
TRACE_LAUNCHES = 10_000
# Seconds of speech a character usually takes.
USUAL_S = 0.07


class EngineLoop:
    """Drives the stages by `Scheduler`. `emit(client, event)` sends; `clock` measures launches."""

    def __init__(self, stages: BaseStages, config: EngineConfig, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        self.stages = stages
        self.config = config
        self.info = stages.info
        self.scheduler = Scheduler(config, stages.costs, self.info.sample_rate, self.info.samples_per_frame)
        self.admission = Admission(self.scheduler)
        self.opening = Opening(stages, config)
        self._onset_s: float | None = None
        self._free_at_s: float | None = None
        self._opened = 0
        self.epoch = secrets.randbits(48) | 1
        self.trace: deque[TraceEntry] = deque(maxlen=TRACE_LAUNCHES)
        self._tally = Tally()
        self._emit = emit
        self._clock = clock
        self._flights: deque[Flight] = deque()
        self._talked: list[Utterance] = []
        """Rows of the Talker's latest launch, which may go on without another look."""
        self._unheard: set[Utterance] = set()
        """Who has a slot and has not sounded."""
        self._stalls = Stalls(config, self.scheduler, self.info.sample_rate)
        self._waiting: dict[tuple[bytes, int], Voice] = {}
        self._active: dict[tuple[bytes, int], Voice] = {}
        self._resting = Resting(config.ahead_s)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._active and not self._flights

    def rehearse(self) -> None:
        """Say a few frames to nobody: what a first utterance has to find out, such as how long this voice is silent before its first
        sound, is then known."""
        emit, self._emit = self._emit, lambda client, event: None
        request = SpeechRequest(live=False, pace="file", max_frames=REHEARSAL_FRAMES, sampling=Sampling(seed=0))
        self.handle(b"", Open(self.epoch, 0, request, "One, two, three.", finished=True), self._clock())
        while not self.idle and self.turn(self._clock()) is not None:
            pass
        self._emit, self._tally = emit, Tally()
        self.trace.clear()

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

    def turn(self, now_s: float) -> float | None:
        """Retire what is done, admit, then make at most one launch. Returns seconds until something is due: 0 after a launch and while
        one is under way, None if only a command can change anything. Raises DeviceLost: the engine is to end then."""
        began_s = self._clock()
        self._retire_done()
        if len(self._flights) >= self.stages.depth:
            self._free_at_s = None
            return 0.0
        if self._free_at_s is None:
            self._free_at_s = began_s
        self._admit(now_s)
        self._close_stalled(now_s)
        launch = self._following()
        if launch is None:
            awake = self._resting.awake(now_s)
            launch = self.scheduler.pick(now_s, awake, len(self._active))
            self._resting.settle(now_s, awake)
            if launch is None:
                self._free_at_s = None
                return 0.0 if self._flights else self._next_due(now_s, awake)
        with self._supervised(launch):
            self._launch(launch)
        if launch.stage is Stage.TALKER and self.stages.depth > 1:
            self._talked = launch.rows
        self._retire_done()
        return 0.0

    def _following(self) -> Launch | None:
        """What comes after the Talker is plain: the Code Predictor of its rows, unless somebody new is to go first. To look at hundreds of
        streams for it takes longer than the launch."""
        talked, self._talked = self._talked, []
        if len(talked) < PAIRED_ROWS and not self._unheard.issubset(talked):
            return None
        rows = [u for u in talked if u.predictor_ready and (voice := self._active.get((u.client, u.number))) and voice.utterance is u]
        return Launch(Stage.PREDICTOR, rows, 1) if rows else None

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

    def _is_active(self, voice: Voice) -> bool:
        """Whether it is this one that has a slot: its number may be another's by now."""
        return self._active.get((voice.utterance.client, voice.utterance.number)) is voice

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

    def _next_due(self, now_s: float, awake: list[Utterance]) -> float | None:
        due = [
            voice.text.starts_in(now_s, self.config.idle_flush_s, self.config.word_pause_s) if voice.ready_s is None else FULL_FOR_S
            for voice in self._waiting.values()
        ]
        due += [self._stalls.next_in(now_s), self.scheduler.wake_in(now_s, awake, len(self._active)), self._resting.wakes_in(now_s)]
        known = [seconds for seconds in due if seconds is not None]
        # A millisecond at least: rounding must not turn waiting into spinning.
        return max(0.001, min(known)) if known else None

    def _launch(self, launch: Launch) -> None:
        """Begin a launch. Cursors move now; what it returns is looked at when it is done, a launch or two later where there is a GPU."""
        rows = launch.rows
        voices = [self._active[u.client, u.number] for u in rows]
        first = [u.frames_decoded if launch.stage is Stage.CODEC else u.frames_issued for u in rows]
        if launch.stage is Stage.TALKER:
            for u in rows:
                if u.request.live and u.text_closed and u.text_issued - u.frames_issued in (0, 1):
                    # This step eats the text's end; live speech may not end before, however the model would like to.
                    self.stages.allow_end(u.slot)
        starts_s = self._clock()
        pending = self.stages.launch(launch.stage, [u.slot for u in rows], first, launch.frames)
        ends_s = self._clock()
        host_s = starts_s - (starts_s if self._free_at_s is None else self._free_at_s)
        silent = sum(not u.samples_emitted for u in rows)
        self._flights.append(Flight(launch, voices, first, pending, silent, starts_s, ends_s - starts_s, host_s, self._opened))
        self._free_at_s, self._opened = ends_s, 0
        self._move(launch)

    def _move(self, launch: Launch) -> None:
        """The cursors of a launch's rows, which are awake."""
        for u in launch.rows:
            u.in_flight += 1
            u.work = None
        match launch.stage:
            case Stage.PREFILL:
                launch.rows[0].prefill_left -= 1
            case Stage.TALKER:
                for u in launch.rows:
                    u.frames_issued += 1
            case Stage.PREDICTOR:
                for u in launch.rows:
                    u.frames_done += 1
                    if u.frames_done >= u.max_frames and not u.speech_ended:
                        u.speech_ended = u.capped = True
            case Stage.CODEC:
                for u in launch.rows:
                    u.frames_decoded += launch.frames
                    u.coming_s += launch.frames * self.scheduler.frame_s

    def _retire_done(self) -> None:
        """Take the results of launches that are done, in their order."""
        while self._flights and self._flights[0].pending.done():
            flight = self._flights.popleft()
            with self._supervised(flight.launch):
                self._retire(flight)

    @contextmanager
    def _supervised(self, launch: Launch) -> Iterator[None]:
        """The border of supervision: a launch that breaks, or what it returned, costs its own rows and not the engine."""
        try:
            yield
        except DeviceLost:
            raise
        except Exception:
            log.exception("a launch of %s over %d rows failed", launch.stage.name, len(launch.rows))
            for u in launch.rows:
                if (u.client, u.number) in self._active:
                    self._fail((u.client, u.number), UtteranceFailed("the engine failed in mid-utterance; its log has the cause"))

    def _retire(self, flight: Flight) -> None:
        launch = flight.launch
        result = flight.pending.result()
        # Whose utterance has ended since: what was made for it is nobody's.
        ours = [self._is_active(voice) for voice in flight.voices]
        for u in launch.rows:
            u.in_flight -= 1
        if launch.stage is Stage.CODEC:
            for u in launch.rows:
                u.coming_s -= launch.frames * self.scheduler.frame_s
                self._resting.changed(u)
        if isinstance(result, int):
            # A neighbour may have computed the same prefix meanwhile.
            launch.rows[0].prefill_left = min(result, launch.rows[0].prefill_left)
            self._resting.changed(launch.rows[0])
        elif isinstance(result, list):
            for voice, mine, first, value in zip(flight.voices, ours, flight.first, result, strict=True):
                if not mine:
                    continue
                if launch.stage is Stage.TALKER:
                    self._retire_token(voice, first, cast("int | None", value))
                else:
                    self._retire_chunk(voice, first, launch.frames, cast("Samples | None", value))
        host_s, seconds = flight.host_s, flight.pending.seconds
        if seconds is None:
            seconds = flight.called_s
        else:
            host_s += flight.called_s
        self.stages.costs.record(launch.stage, len(launch.rows), launch.frames, seconds)
        self._tally.launched(launch.stage, len(launch.rows), seconds, host_s)
        if self.stages.depth > 1:
            # Where a launch is over when it returns, the host waits for the device and not the other way round.
            self.scheduler.host_s += HOST_SHARE * (host_s - self.scheduler.host_s)
        self.trace.append(flight.entry(seconds))
        for voice in flight.voices:
            u = voice.utterance
            if u.speech_ended and not u.in_flight and u.complete and self._is_active(voice):
                self._say_held(voice)
                self._end((u.client, u.number), u.cap_reason if u.capped else u.reason)

    def _retire_token(self, voice: Voice, number: int, token: int | None) -> None:
        """The row's token number `number`, None where speech has ended before it."""
        u = voice.utterance
        if u.frames_end is not None:
            return
        if token is None:
            u.end_at(number)
            self._resting.changed(u)
        elif token < 0:
            self._fail((u.client, u.number), UtteranceFailed("the Talker computed something that is not a number; try again"))
        elif voice.guard is not None:
            voice.guard.see(token)
            self._heed(voice)

    def _retire_chunk(self, voice: Voice, first: int, frames: int, samples: Samples | None) -> None:
        u = voice.utterance
        if samples is None:
            self._fail((u.client, u.number), UtteranceFailed("the codec computed something that is not a number; try again"))
            return
        if u.frames_end is not None:
            # Made before it was known that speech had ended.
            samples = samples[: max(0, u.frames_end - first) * self.info.samples_per_frame]
        if voice.guard is not None:
            voice.guard.hear(samples)
            self._heed(voice)
        self._say(voice, voice.onset.push(samples) if voice.onset is not None else samples)

    def _say_held(self, voice: Voice) -> None:
        """An utterance that never sounded ends with the silence that was held back."""
        if voice.onset is not None:
            self._say(voice, voice.onset.flush())

    def _say(self, voice: Voice, samples: Samples) -> None:
        if not len(samples):
            return
        u, now_s = voice.utterance, self._clock()
        if u.live and u.has_sounded:
            self._tally.chunk_ready(u.playback.dry_at(now_s) - now_s)
        if voice.onset is not None and not u.has_sounded:
            self._learn_onset(voice.onset.dropped / self.info.sample_rate)
        self._emit(u.client, AudioChunk(self.epoch, u.number, u.samples_emitted, u.chars_eaten, samples.tobytes()))
        self._unheard.discard(u)
        u.samples_emitted += len(samples)
        u.playback.emit(len(samples), now_s)

    def _learn_onset(self, dropped_s: float) -> None:
        self._onset_s = dropped_s if self._onset_s is None else self._onset_s + ONSET_SHARE * (dropped_s - self._onset_s)

    def _heed(self, voice: Voice) -> None:
        """End speech that has gone wrong; the frames made so far are still spoken."""
        u = voice.utterance
        if voice.guard is not None and voice.guard.verdict is not None and not u.speech_ended:
            u.speech_ended, u.reason = True, voice.guard.verdict
            self._resting.changed(u)
            log.warning("utterance %d ended by its guard: %s after %d frames", u.number, u.reason, u.frames_issued)

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
