"""Which rows of which stage run next. The whole policy is `Scheduler.pick`; it knows integers and seconds, no tensors.
A device may ask it a thousand times a second about hundreds of streams: what was found about one holds until something changes about it
(`Utterance.work`).

A stream's slack is the time until its listener runs dry, less the work its next chunk still needs, less safety.
  1. a stream with no slack left, or little where streams are more than a launch takes: the earliest to run dry goes first;
  2. otherwise a stream that has not sounded yet: live before downloads, the oldest first, at the stage nearest to sound;
  3. otherwise the smallest slack, as long as its listener is less than `ahead_s` ahead; else wait.
The anchor so found is joined by rows that are ready for the same work.

It is calm as long as every live listener has `calm_s` of slack: then what newcomers wait for counts more than the device's time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

from engine.config import EngineConfig
from engine.request import Utterance

# Share of a frame's duration its making may take for a chunk size to count as sustained; the rest absorbs jitter.
SUSTAINED = 0.8
# So many times what the codec takes for a frame of all streams, where they are more than a launch takes, somebody who is listened to goes
# before newcomers: of hundreds there is always a newcomer, and those who are listened to would be served when it is too late.
EARLY = 2
# Share of a frame's duration in which the codec should have decoded a frame of every stream.
CODEC_SHARE = 0.25
# In a calm no launch takes longer than a frame's codes of one row by this factor: somebody may come who waits for its end.
QUICK = 1.15
# How often costs are looked at.
NEEDS_S = 0.01
# Costs that differ by no more than this share are the same.
CHANGED = 0.1


class Stage(IntEnum):
    """The three kinds of work, and before them a piece of a prompt that is not known yet; a larger one is nearer to sound."""

    PREFILL = 0
    TALKER = 1
    PREDICTOR = 2
    CODEC = 3

    # Enum's own is a call of Python at each look into the costs.
    __hash__ = int.__hash__


class Needs(NamedTuple):
    """What work takes at the batch sizes now usual, in seconds: a frame's codes, a piece of a prompt, a codec launch by its frames. An
    utterance's first chunk has `first` frames, a later one `smallest` or one of the `larger`, largest first. Who is listened to goes before
    newcomers from `early_s` before it would be late."""

    frame_s: float
    prompt_s: float
    codec_s: dict[int, float]
    first: int
    smallest: int
    larger: tuple[int, ...]
    early_s: float

    def about(self, other: Needs) -> bool:
        """Whether no figure differs from the other's by more than CHANGED."""
        if self[3:6] != other[3:6] or self.codec_s.keys() != other.codec_s.keys():
            return False
        pairs = [(self.frame_s, other.frame_s), (self.prompt_s, other.prompt_s), *zip(self.codec_s.values(), other.codec_s.values(), strict=True)]
        return all(abs(mine - its) <= CHANGED * its for mine, its in pairs)


class ReadyWork(NamedTuple):
    """What one utterance can have done for it next; `stage` None: nothing, until something happens to it. `frames` counts for Codec only;
    `undecoded` frames are there for it, and `also` is the other stage that a row which waits for Codec is ready for. Its listener runs dry
    at `dry_at`, and it has slack up to `due_s`: infinite for a download. From `until_s` on this may no longer be so."""

    utterance: Utterance
    stage: Stage | None
    frames: int
    dry_at: float
    due_s: float
    sounded: bool
    undecoded: int
    also: Stage | None
    until_s: float
    needs: Needs


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
        self.host_s = 0.0
        """What a launch usually takes the host, which has nothing else to do."""
        self._needs = Needs(0.0, 0.0, dict.fromkeys((config.first_frames, *config.chunk_frames), 0.0), 1, config.chunk_frames[0], (), 0.0)
        self._needs_s = -math.inf
        self.calm_until_s = -math.inf
        """As far as is known it is calm until then, unless somebody new comes."""

    def pick(self, now_s: float, utterances: Sequence[Utterance], streams: int | None = None) -> Launch | None:
        """The next launch, or None if nothing is ready or everyone is far enough ahead. There are so many `streams`, if not only those that
        are to be looked at."""
        work = self.survey(now_s, utterances, self.config.ahead_s, streams)
        anchor = self._anchor(now_s, work)
        self.calm_until_s = self._calm_end_s(now_s, anchor, work)
        return None if anchor is None else self._launch(now_s, anchor, work)

    def _calm_end_s(self, now_s: float, anchor: ReadyWork | None, work: list[ReadyWork]) -> float:
        """Downloads want all of the device: with them it is never calm."""
        # Of hundreds the anchor mostly is short already, and nobody else need be looked at.
        short = anchor is not None and anchor.sounded and anchor.due_s < now_s + self.config.calm_s
        if short or self.config.calm_s == math.inf or not all(item.utterance.live for item in work):
            return -math.inf
        return min((item.due_s for item in work if item.sounded), default=math.inf) - self.config.calm_s

    def wake_in(self, now_s: float, utterances: Sequence[Utterance], streams: int | None = None) -> float | None:
        """Seconds until a stream that is ready but far ahead wants work again; None if there is none."""
        due_s = min((item.due_s for item in self.survey(now_s, utterances, streams=streams) if item.utterance.live), default=None)
        return None if due_s is None else max(0.0, due_s - now_s - self.config.ahead_s)

    def survey(self, now_s: float, utterances: Sequence[Utterance], within_s: float = math.inf, streams: int | None = None) -> list[ReadyWork]:
        """What each utterance needs next, of those for which something can be done and whose slack is less than `within_s`, and of downloads.

        At 800 streams nearly all of it was found before, and holds."""
        if not 0.0 <= now_s - self._needs_s < NEEDS_S:
            self._needs_s = now_s
            self._reckon(len(utterances) if streams is None else streams)
        needs = self._needs
        due_s, found, inf = now_s + within_s, self._find, math.inf
        work: list[ReadyWork] = []
        add = work.append
        # By place and not by name, which takes twice as long: until_s, needs, stage, due_s.
        for u in utterances:
            item = u.work
            if item is None or item[8] <= now_s or item[9] is not needs:
                item = u.work = found(needs, now_s, u)
            if item[1] is not None and (item[4] < due_s or item[4] == inf):
                add(item)
        return work

    def _find(self, needs: Needs, now_s: float, u: Utterance) -> ReadyWork:
        """Plain to the point of repeating `Utterance`'s own properties: this is the engine's most frequent work."""
        frame_s, prompt_s, codec_s, first, smallest, larger, _ = needs
        inf, safety_s = math.inf, self.config.safety_s
        emitted, live, clock = u.samples_emitted, u.live, u.playback
        sounded = emitted > 0
        dry_at = until_s = inf
        if live or not sounded:
            if clock.dry_s is None:
                # It moves with the time.
                dry_at, until_s = clock.dry_at(now_s) + u.coming_s, now_s
            else:
                dry_at = clock.dry_s + u.coming_s
        done, ended = u.frames_done, u.speech_ended
        undecoded = done - u.frames_decoded
        if not sounded:
            chunk = first
        elif not live:
            chunk = larger[0] if larger else smallest
        else:
            # The most that the listener's buffer leaves time to make, the least when it is short. Half the buffer: the other half is
            # for the neighbours' launches and what the estimate gets wrong.
            half_s = (dry_at - now_s - safety_s) / 2
            chunk = smallest
            for size in larger:
                needed_s = (size - undecoded if size > undecoded else 0) * frame_s + codec_s[size]
                if needed_s <= half_s:
                    chunk = size
                    until_s = min(until_s, dry_at - safety_s - 2 * needed_s)
                    break
        stage: Stage | None
        if u.frames_issued > done:
            stage = Stage.PREDICTOR
        elif u.prefill_left:
            stage = Stage.PREFILL
        elif not ended and (u.text_closed or done < u.text_issued):
            stage = Stage.TALKER
        else:
            stage = None
        frames, also = 1, None
        # All of a stream's frames are decoded once no more can be made: its speech has ended, or it waits for text.
        if undecoded >= chunk or (undecoded and stage is None):
            also = None if stage is Stage.PREFILL else stage
            most = len(self._pieces) - 1
            stage, frames = Stage.CODEC, self._pieces[undecoded if undecoded < most else most]
            if frames > chunk:
                frames = chunk
            if emitted - u.samples_consumed >= self._credit:
                stage = None
        due_s = inf
        if dry_at != inf:
            missing = 0 if ended or undecoded > chunk else chunk - undecoded
            due_s = dry_at - (u.prefill_left * prompt_s + missing * frame_s + codec_s[chunk]) - safety_s
        # What its own constructor does, at half the cost.
        return tuple.__new__(ReadyWork, (u, stage, frames, dry_at, due_s, sounded, undecoded, also, until_s, needs))

    def _reckon(self, streams: int) -> None:
        """What work takes now. What was found about utterances holds as long as costs stay about the same."""
        rows, estimate = self._rows(), self.costs.estimate
        least = self.least_chunk()
        first = max(self.config.first_frames, least)
        least = self._least_of_many(streams, least)
        smallest, *larger = [size for size in self.config.chunk_frames if size >= least]
        codec_s = {size: estimate(Stage.CODEC, rows, size) for size in (smallest, *larger, first)}
        early_s = EARLY * self._share(streams, Stage.CODEC, streams, smallest) if streams > self.most_rows(Stage.CODEC) else 0.0
        fresh = Needs(self._frame_cost_s(rows), estimate(Stage.PREFILL, 1), codec_s, first, smallest, tuple(reversed(larger)), early_s)
        if not fresh.about(self._needs):
            self._needs = fresh

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

    def _least_of_many(self, streams: int, least: int) -> int:
        """The smallest chunk, from `least` on, with which a frame of so many streams, more than a launch takes, is decoded in the
        codec's share of its time."""
        if streams <= self.most_rows(Stage.CODEC):
            return least
        sizes = [n for n in self.config.chunk_frames if n >= least]
        fine = [n for n in sizes if self._share(streams, Stage.CODEC, streams, n) / n <= CODEC_SHARE * self.frame_s]
        return min(fine, default=sizes[-1])

    def load(self, streams: int) -> float:
        """The share of the device, or of the host, that so many live streams need for good, at the chunk size that costs least; above 1
        they cannot all be kept."""
        codec_s = min(self._share(streams, Stage.CODEC, streams, n) / n for n in self.config.chunk_frames)
        return (self._share(streams, Stage.TALKER, streams) + self._share(streams, Stage.PREDICTOR, streams) + codec_s) / self.frame_s

    def _share(self, streams: int, stage: Stage, rows: int, frames: int = 1) -> float:
        """Seconds of a stage for each of so many streams once, as many launches as there must be: each takes what `rows` take, or the host."""
        most = self.most_rows(stage)
        return math.ceil(streams / most) * max(self.costs.estimate(stage, min(rows, most), frames), self.host_s)

    def most_rows(self, stage: Stage) -> int:
        """Of a launch."""
        return min(self.config.codec_rows, self.config.buckets[-1]) if stage is Stage.CODEC else self.config.buckets[-1]

    def next_frame_s(self) -> float:
        """What it takes to make the next frame heard at the batch sizes now usual, with safety."""
        rows = self._rows()
        return self._frame_cost_s(rows) + self.costs.estimate(Stage.CODEC, rows, self._needs.smallest) + self.config.safety_s

    def _rows(self) -> int:
        return max(1, round(self.usual_rows))

    def _frame_cost_s(self, rows: int) -> float:
        """What the codes of `rows` streams' next frame cost."""
        return self.costs.estimate(Stage.TALKER, rows) + self.costs.estimate(Stage.PREDICTOR, rows)

    def _anchor(self, now_s: float, work: list[ReadyWork]) -> ReadyWork | None:
        late_s = now_s + self._needs.early_s
        late = [item for item in work if item.due_s <= late_s and item.sounded]
        if late:
            return min(late, key=attrgetter("dry_at"))
        silent = [item for item in work if not item.sounded]
        if silent:
            return min(silent, key=lambda item: (not item.utterance.live, item.utterance.arrived_s, -(item.stage or 0)))
        nearest = min(work, key=attrgetter("due_s"), default=None)
        if nearest is not None and nearest.due_s < now_s + self.config.ahead_s:
            return nearest
        return next((item for item in work if not item.utterance.live), None)

    def _launch(self, now_s: float, anchor: ReadyWork, work: list[ReadyWork]) -> Launch:
        """Fill the anchor's launch with rows ready for the same work, in order of need, up to what the anchor can spare."""
        stage, frames, ahead_s = anchor.stage, anchor.frames, now_s + self.config.ahead_s
        assert stage is not None
        if stage is Stage.PREFILL:
            return Launch(stage, [anchor.utterance], frames)
        # A row that waits for the codec may be ready for its next frame as well.
        fits = [item for item in work if item.stage is stage or item.also is stage]
        if stage is Stage.CODEC:
            fits = [item for item in fits if item.undecoded >= frames]
        others = [item for item in fits if (item.due_s < ahead_s or not item.sounded or not item.utterance.live) and item is not anchor]
        if not anchor.sounded and now_s < self.calm_until_s:
            # Each row more makes a launch longer.
            others = [item for item in others if not item.sounded]
        silent = sorted((item for item in others if not item.sounded), key=lambda item: item.utterance.arrived_s)
        heard = sorted((item for item in others if item.sounded), key=attrgetter("due_s"))
        rows = [anchor.utterance, *(item.utterance for item in silent), *(item.utterance for item in heard)]
        rows = rows[: self._room(now_s, anchor, stage, len(rows))]
        self.usual_rows += 0.05 * (len(rows) - self.usual_rows)
        return Launch(stage, rows, frames)

    def _room(self, now_s: float, anchor: ReadyWork, stage: Stage, rows: int) -> int:
        """Of the buckets that cost the anchor no more than it can spare, and never less than a second row's worth, the one with which
        all of `rows` are served soonest: half a bucket of padding may cost more than a second launch. Where that is even, the larger
        one: it may only be so because it was never measured."""
        if rows == 1:
            return 1
        frames = anchor.frames
        most = self.most_rows(stage)
        cost_s = {size: self.costs.estimate(stage, size, frames) for size in self.config.buckets if size <= most}
        alone = self.costs.estimate(stage, 1, frames)
        # Who has not sounded waits for every millisecond; to who is late already a few more are nothing beside what they save the others.
        spare = max(anchor.due_s - now_s, self.config.safety_s, 2 * alone) if anchor.sounded else 2 * alone
        if anchor.sounded and now_s < self.calm_until_s:
            spare = max(0.0, QUICK * self.costs.estimate(Stage.PREDICTOR, 1) - alone)
        best, least_s = 1, rows * alone
        for size, seconds in cost_s.items():
            whole, rest = divmod(rows, size)
            all_s = whole * seconds + (cost_s[self.costs.bucket(rest)] if rest else 0.0)
            if seconds - alone <= spare and all_s <= least_s:
                best, least_s = size, all_s
        return best
