"""EngineLoop: retire, admit, pick, launch. What is computed for the utterances of its ensemble, and what comes of it; one thread owns it, and
time comes in as `now_s`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
from numpy.typing import NDArray

from engine.admission import FULL_FOR_S
from engine.config import EngineConfig
from engine.ensemble import Emit, Ensemble
from engine.errors import DeviceLost, UtteranceFailed
from engine.flight import Flight, TraceEntry
from engine.messages import AudioChunk, Open, Sampling, SpeechRequest
from engine.opening import Voice
from engine.request import Utterance
from engine.scheduler import Launch, Stage
from engine.stages.base import BaseStages
from engine.tally import Tally

log = logging.getLogger(__name__)

Samples = NDArray[np.int16]
# As long as the silence that is trimmed may be, and a few more.
REHEARSAL_FRAMES = 8
# Weight of the latest launch in what a launch usually takes the host.
HOST_SHARE = 0.05
# So many rows of the Talker go on to the Code Predictor without another look, even if somebody new waits.
PAIRED_ROWS = 64
TRACE_LAUNCHES = 10_000


class EngineLoop(Ensemble):
    """An ensemble whose stages are driven by `Scheduler`. `emit(client, event)` sends; `clock` measures launches."""

    def __init__(self, stages: BaseStages, config: EngineConfig, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stages, config, emit)
        self.trace: deque[TraceEntry] = deque(maxlen=TRACE_LAUNCHES)
        self._clock = clock
        self._free_at_s: float | None = None
        self._flights: deque[Flight] = deque()
        self._talked: list[Utterance] = []
        """Rows of the Talker's latest launch, which may go on without another look."""

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
        if self._flights and now_s < self.scheduler.calm_until_s and all(u.starved for u in self._unheard):
            # Whoever comes now waits for one launch and not for two.
            self._free_at_s = None
            return 0.0
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
        """What comes after the Talker is plain: the Code Predictor of its rows, unless somebody new can go first. To look at hundreds of
        streams for it takes longer than the launch."""
        talked, self._talked = self._talked, []
        if len(talked) < PAIRED_ROWS and not all(u.starved for u in self._unheard.difference(talked)):
            return None
        rows = [u for u in talked if u.predictor_ready and (voice := self._active.get((u.client, u.number))) and voice.utterance is u]
        return Launch(Stage.PREDICTOR, rows, 1) if rows else None

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

    def _heed(self, voice: Voice) -> None:
        """End speech that has gone wrong; the frames made so far are still spoken."""
        u = voice.utterance
        if voice.guard is not None and voice.guard.verdict is not None and not u.speech_ended:
            u.speech_ended, u.reason = True, voice.guard.verdict
            self._resting.changed(u)
            log.warning("utterance %d ended by its guard: %s after %d frames", u.number, u.reason, u.frames_issued)
