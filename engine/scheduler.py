"""Which rows of which stage run next. The whole policy is `Scheduler.pick`; it knows integers and seconds, no tensors.
A device may ask it a thousand times a second about hundreds of streams: what is the same for all of them is worked out once a turn.

A stream's `slack` is the time until its listener runs dry, less the work its next chunk still needs, less safety.
  1. a stream with no slack left: the earliest to run dry goes first;
  2. otherwise a stream that has not sounded yet: live before downloads, the oldest first, at the stage nearest to sound;
  3. otherwise the smallest slack, as long as its listener is less than `ahead_s` ahead; else wait.
The anchor so found is joined by rows that are ready for the same work."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

from engine.config import EngineConfig
from engine.request import Utterance

# Share of a frame's duration its making may take for a chunk size to count as sustained; the rest absorbs jitter.
SUSTAINED = 0.8


class Stage(IntEnum):
    """The three kinds of work, and before them a piece of a prompt that is not known yet; a larger one is nearer to sound."""

    PREFILL = 0
    TALKER = 1
    PREDICTOR = 2
    CODEC = 3

    # Enum's own is a call of Python at each look into the costs.
    __hash__ = int.__hash__


class ReadyWork(NamedTuple):
    """What one utterance can have done for it now. `frames` counts for Codec only; `undecoded` frames are there for it, and `also` is the
    other stage that a row which waits for Codec is ready for. `dry_at` and `slack` are infinite for a download."""

    utterance: Utterance
    stage: Stage
    frames: int
    dry_at: float
    slack: float
    sounded: bool
    undecoded: int
    also: Stage | None


@dataclass(frozen=True)
class Launch:
    """One batch of one stage; every Codec row decodes `frames` frames. A piece of a prompt goes alone."""

    stage: Stage
    rows: list[Utterance]
    frames: int


class StageCosts:
    """Seconds a launch takes, by stage, batch bucket and frames: measured at start, corrected by a running mean."""

    def __init__(self, buckets: Sequence[int], mean_over: int = 16) -> None:
        self._buckets = tuple(buckets)
        self._share = 1.0 / mean_over
        self._seconds: dict[tuple[Stage, int, int], float] = {}
        self._scaled: dict[tuple[Stage, int, int], tuple[tuple[Stage, int, int], float]] = {}
        """For what was never measured: the nearest that was, and the factor to it."""

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds `rows`."""
        return self._buckets[min(bisect_left(self._buckets, rows), len(self._buckets) - 1)]

    def record(self, stage: Stage, rows: int, frames: int, seconds: float) -> None:
        key = (stage, self.bucket(rows), frames)
        known = self._seconds.get(key)
        if known is None:
            self._scaled.clear()
        self._seconds[key] = seconds if known is None else known + self._share * (seconds - known)

    def estimate(self, stage: Stage, rows: int, frames: int = 1) -> float:
        """Seconds of a launch; a combination never measured is scaled from the nearest one known, and nothing known costs nothing."""
        key = stage, self.bucket(rows), frames
        known = self._seconds.get(key)
        if known is not None:
            return known
        if key not in self._scaled:
            candidates = [(abs(math.log2(b / key[1])) + abs(math.log2(f / frames)), b, f) for s, b, f in self._seconds if s is stage]
            if not candidates:
                return 0.0
            _, b, f = min(candidates)
            self._scaled[key] = (stage, b, f), max(1.0, frames / f) * max(1.0, key[1] / b)
        nearest, factor = self._scaled[key]
        return self._seconds[nearest] * factor

    def known(self) -> list[tuple[Stage, int, int, float]]:
        """Stage, bucket, frames and seconds of every launch that has been measured."""
        return [(*key, seconds) for key, seconds in sorted(self._seconds.items())]

    def describe(self) -> str:
        """The measured costs in words, for the log."""
        parts = [
            f"{stage.name.lower()} b{rows}{f' x{frames}' if stage is Stage.CODEC else ''} {seconds * 1000:.1f} ms"
            for stage, rows, frames, seconds in self.known()
        ]
        return ", ".join(parts)


class Scheduler:
    def __init__(self, config: EngineConfig, costs: StageCosts, sample_rate: int, samples_per_frame: int) -> None:
        self.config = config
        self.costs = costs
        self.samples_per_frame = samples_per_frame
        self.frame_s = samples_per_frame / sample_rate
        self._credit = int(config.credit_s * sample_rate)
        # The largest chunk size that so many frames fill; a remainder is decoded in the smallest pieces that exist or as it is.
        most = config.chunk_frames[-1]
        self._pieces = [max((size for size in config.chunk_frames if size <= frames), default=frames) for frames in range(most + 1)]
        self.usual_rows = 1.0
        self._least = config.chunk_frames[0]

    def pick(self, now_s: float, utterances: Iterable[Utterance]) -> Launch | None:
        """The next launch, or None if nothing is ready or everyone is far enough ahead."""
        work = self.survey(now_s, utterances, self.config.ahead_s)
        anchor = self._anchor(work)
        return None if anchor is None else self._launch(anchor, work)

    def wake_in(self, now_s: float, utterances: Iterable[Utterance]) -> float | None:
        """Seconds until a stream that is ready but far ahead wants work again; None if there is none."""
        slacks = [item.slack for item in self.survey(now_s, utterances) if item.utterance.live]
        return max(0.0, min(slacks) - self.config.ahead_s) if slacks else None

    def survey(self, now_s: float, utterances: Iterable[Utterance], within_s: float = math.inf) -> list[ReadyWork]:
        """What each utterance needs next, of those for which something can be done now. Of streams whose slack is `within_s` or more some
        are left out.

        Plain to the point of repeating `Utterance`'s own properties: at 800 streams a call here is a tenth of a millisecond."""
        self._least = self.least_chunk()
        rows = self._rows()
        frame_s, prompt_s = self._frame_cost_s(rows), self.costs.estimate(Stage.PREFILL, 1)
        first = max(self.config.first_frames, self._least)
        smallest, *larger = [size for size in self.config.chunk_frames if size >= self._least]
        codec_s = {size: self.costs.estimate(Stage.CODEC, rows, size) for size in (smallest, *larger, first)}
        larger_s = [(size, codec_s[size]) for size in reversed(larger)]
        largest = larger[-1] if larger else smallest
        safety_s, credit, pieces, most = self.config.safety_s, self._credit, self._pieces, len(self._pieces) - 1
        prefill, talker, predictor, codec, inf = Stage.PREFILL, Stage.TALKER, Stage.PREDICTOR, Stage.CODEC, math.inf
        # Whoever runs dry later has that much slack, whatever the next chunk is; a microsecond for rounding.
        far_s = now_s + within_s + safety_s + largest * frame_s + max(codec_s.values()) + 1e-6
        make, kind = tuple.__new__, ReadyWork
        work: list[ReadyWork] = []
        add = work.append
        for u in utterances:
            emitted, live, clock = u.samples_emitted, u.live, u.playback
            sounded = emitted > 0
            if live or not sounded:
                dry_at = (clock.dry_at(now_s) if clock.dry_s is None else clock.dry_s) + u.coming_s
                if dry_at >= far_s and sounded:
                    continue
            else:
                dry_at = inf
            done, ended = u.frames_done, u.speech_ended
            undecoded = done - u.frames_decoded
            if not sounded:
                chunk = first
            elif not live:
                chunk = largest
            else:
                # The most that the listener's buffer leaves time to make, the least when it is short. Half the buffer: the other half is
                # for the neighbours' launches and what the estimate gets wrong.
                half_s = (dry_at - now_s - safety_s) / 2
                chunk = smallest
                for size, seconds in larger_s:
                    if (size - undecoded if size > undecoded else 0) * frame_s + seconds <= half_s:
                        chunk = size
                        break
            if u.frames_issued > done:
                stage = predictor
            elif u.prefill_left:
                stage = prefill
            elif not ended and (u.text_closed or done < u.text_issued):
                stage = talker
            else:
                stage = None
            frames, also = 1, None
            # All of a stream's frames are decoded once no more can be made: its speech has ended, or it waits for text.
            if undecoded >= chunk or (undecoded and stage is None):
                if emitted - u.samples_consumed >= credit:
                    continue
                also = None if stage is prefill else stage
                stage, frames = codec, pieces[undecoded if undecoded < most else most]
                if frames > chunk:
                    frames = chunk
            elif stage is None:
                continue
            if dry_at == inf:
                slack = inf
            else:
                missing = 0 if ended or undecoded > chunk else chunk - undecoded
                slack = dry_at - now_s - (u.prefill_left * prompt_s + missing * frame_s + codec_s[chunk]) - safety_s
            add(make(kind, (u, stage, frames, dry_at, slack, sounded, undecoded, also)))
        return work

    def least_chunk(self) -> int:
        """The smallest chunk that is played no faster than the next can be made: on a slow device a codec launch of one frame
        costs more than the frame lasts, and a stream served so would fall behind for good."""
        rows = self._rows()
        frame_s = self._frame_cost_s(rows)
        cost_s = {n: frame_s + self.costs.estimate(Stage.CODEC, rows, n) / n for n in self.config.chunk_frames}
        # Where none leaves room for jitter, one that just keeps up is still better than a larger one, which starts with a gap.
        for share in (SUSTAINED, 1.0):
            kept = [n for n, seconds in cost_s.items() if seconds <= share * self.frame_s]
            if kept:
                return min(kept)
        return min(cost_s, key=cost_s.__getitem__)

    def load(self, rows: int) -> float:
        """The share of the device that `rows` live streams need for good, at the chunk size that costs least; above 1 they cannot all be kept."""
        codec_s = min(self.costs.estimate(Stage.CODEC, rows, n) / n for n in self.config.chunk_frames)
        launches = math.ceil(rows / self.config.buckets[-1])
        return launches * (self._frame_cost_s(rows) + codec_s) / self.frame_s

    def next_frame_s(self) -> float:
        """What it takes to make the next frame heard at the batch sizes now usual, with safety."""
        rows = self._rows()
        return self._frame_cost_s(rows) + self.costs.estimate(Stage.CODEC, rows, self._least) + self.config.safety_s

    def _rows(self) -> int:
        return max(1, round(self.usual_rows))

    def _frame_cost_s(self, rows: int) -> float:
        """What the codes of `rows` streams' next frame cost."""
        return self.costs.estimate(Stage.TALKER, rows) + self.costs.estimate(Stage.PREDICTOR, rows)

    def _anchor(self, work: list[ReadyWork]) -> ReadyWork | None:
        late = [item for item in work if item.slack <= 0 and item.sounded]
        if late:
            return min(late, key=attrgetter("dry_at"))
        silent = [item for item in work if not item.sounded]
        if silent:
            return min(silent, key=lambda item: (not item.utterance.live, item.utterance.arrived_s, -item.stage))
        nearest = min(work, key=attrgetter("slack"), default=None)
        if nearest is not None and nearest.slack < self.config.ahead_s:
            return nearest
        return next((item for item in work if not item.utterance.live), None)

    def _launch(self, anchor: ReadyWork, work: list[ReadyWork]) -> Launch:
        """Fill the anchor's launch with rows ready for the same work, in order of need, up to what the anchor can spare."""
        stage, frames, ahead_s = anchor.stage, anchor.frames, self.config.ahead_s
        if stage is Stage.PREFILL:
            return Launch(stage, [anchor.utterance], frames)
        # A row that waits for the codec may be ready for its next frame as well.
        fits = [item for item in work if item.stage is stage or item.also is stage]
        if stage is Stage.CODEC:
            fits = [item for item in fits if item.undecoded >= frames]
        others = [item for item in fits if (item.slack < ahead_s or not item.sounded or not item.utterance.live) and item is not anchor]
        silent = sorted((item for item in others if not item.sounded), key=lambda item: item.utterance.arrived_s)
        heard = sorted((item for item in others if item.sounded), key=attrgetter("slack"))
        rows = [anchor.utterance, *(item.utterance for item in silent), *(item.utterance for item in heard)]
        rows = rows[: self._room(anchor, len(rows))]
        self.usual_rows += 0.05 * (len(rows) - self.usual_rows)
        return Launch(stage, rows, frames)

    def _room(self, anchor: ReadyWork, rows: int) -> int:
        """Of the buckets that cost the anchor no more than it can spare, and never less than a second row's worth, the one with which
        all of `rows` are served soonest: half a bucket of padding may cost more than a second launch. Where that is even, the larger
        one: it may only be so because it was never measured."""
        if rows == 1:
            return 1
        stage, frames = anchor.stage, anchor.frames
        most = self.config.codec_rows if stage is Stage.CODEC else self.config.buckets[-1]
        cost_s = {size: self.costs.estimate(stage, size, frames) for size in self.config.buckets if size <= most}
        alone = self.costs.estimate(stage, 1, frames)
        spare = max(anchor.slack if anchor.sounded else 0.0, 2 * alone)
        best, least_s = 1, rows * alone
        for size, seconds in cost_s.items():
            whole, rest = divmod(rows, size)
            all_s = whole * seconds + (cost_s[self.costs.bucket(rest)] if rest else 0.0)
            if seconds - alone <= spare and all_s <= least_s:
                best, least_s = size, all_s
        return best
