"""Which rows of which stage run next. The whole policy is `Scheduler.pick`; it knows integers and seconds, no tensors.

A stream's `slack` is the time until its listener runs dry, less the work its next chunk still needs, less safety.
  1. a stream with no slack left: the earliest to run dry goes first;
  2. otherwise a stream that has not sounded yet: live before downloads, the oldest first, at the stage nearest to sound;
  3. otherwise the smallest slack, as long as its listener is less than `ahead_s` ahead; else wait.
The anchor so found is joined by rows that are ready for the same work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

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


@dataclass(frozen=True)
class ReadyWork:
    """What one utterance can have done for it now. `frames` counts for Codec only. `dry_at` and `slack` are infinite for a download."""

    utterance: Utterance
    stage: Stage
    frames: int
    dry_at: float
    slack: float


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

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds `rows`."""
        return next((size for size in self._buckets if size >= rows), self._buckets[-1])

    def record(self, stage: Stage, rows: int, frames: int, seconds: float) -> None:
        key = (stage, self.bucket(rows), frames)
        known = self._seconds.get(key)
        self._seconds[key] = seconds if known is None else known + self._share * (seconds - known)

    def estimate(self, stage: Stage, rows: int, frames: int = 1) -> float:
        """Seconds of a launch; a combination never measured is scaled from the nearest one known, and nothing known costs nothing."""
        bucket = self.bucket(rows)
        known = self._seconds.get((stage, bucket, frames))
        if known is not None:
            return known
        candidates = [(abs(math.log2(b / bucket)) + abs(math.log2(f / frames)), b, f) for s, b, f in self._seconds if s is stage]
        if not candidates:
            return 0.0
        _, b, f = min(candidates)
        return self._seconds[stage, b, f] * max(1.0, frames / f) * max(1.0, bucket / b)

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
        self.usual_rows = 1.0
        self._least = config.chunk_frames[0]

    def pick(self, now_s: float, utterances: Iterable[Utterance]) -> Launch | None:
        """The next launch, or None if nothing is ready or everyone is far enough ahead."""
        self._least = self.least_chunk()
        work = [item for item in (self.ready(utterance, now_s) for utterance in utterances) if item is not None]
        anchor = self._anchor(work)
        return None if anchor is None else self._launch(anchor, work)

    def wake_in(self, now_s: float, utterances: Iterable[Utterance]) -> float | None:
        """Seconds until a stream that is ready but far ahead wants work again; None if there is none."""
        slacks = [item.slack for item in (self.ready(u, now_s) for u in utterances) if item is not None and item.utterance.live]
        return max(0.0, min(slacks) - self.config.ahead_s) if slacks else None

    def ready(self, utterance: Utterance, now_s: float) -> ReadyWork | None:
        """What this utterance needs next, if it can be done now."""
        u = utterance
        chunk = self.chunk_frames(u, now_s)
        waits = u.speech_ended or u.stalled
        if u.undecoded >= chunk or (u.undecoded and waits and not u.predictor_ready):
            if u.samples_emitted - u.samples_consumed >= self._credit:
                return None
            stage, frames = Stage.CODEC, min(chunk, self._chunk_size(u.undecoded))
        elif u.predictor_ready:
            stage, frames = Stage.PREDICTOR, 1
        elif u.talker_ready:
            stage, frames = Stage.TALKER, 1
        elif u.prefill_left:
            stage, frames = Stage.PREFILL, 1
        else:
            return None
        if not u.live and u.has_sounded:
            return ReadyWork(u, stage, frames, math.inf, math.inf)
        dry_at = u.playback.dry_at(now_s)
        return ReadyWork(u, stage, frames, dry_at, dry_at - now_s - self._needed_s(u, chunk) - self.config.safety_s)

    def least_chunk(self) -> int:
        """The smallest chunk that is played no faster than the next can be made: on a slow device a codec launch of one frame
        costs more than the frame lasts, and a stream served so would fall behind for good."""
        rows = max(1, round(self.usual_rows))
        frame_s = self.costs.estimate(Stage.TALKER, rows) + self.costs.estimate(Stage.PREDICTOR, rows)
        cost_s = {n: frame_s + self.costs.estimate(Stage.CODEC, rows, n) / n for n in self.config.chunk_frames}
        # Where none leaves room for jitter, one that just keeps up is still better than a larger one, which starts with a gap.
        for share in (SUSTAINED, 1.0):
            kept = [n for n, seconds in cost_s.items() if seconds <= share * self.frame_s]
            if kept:
                return min(kept)
        return min(cost_s, key=cost_s.__getitem__)

    def load(self, rows: int) -> float:
        """The share of the device that `rows` live streams need for good, at the chunk size that costs least; above 1 they cannot all be kept."""
        frame_s = self.costs.estimate(Stage.TALKER, rows) + self.costs.estimate(Stage.PREDICTOR, rows)
        codec_s = min(self.costs.estimate(Stage.CODEC, rows, n) / n for n in self.config.chunk_frames)
        launches = math.ceil(rows / self.config.buckets[-1])
        return launches * (frame_s + codec_s) / self.frame_s

    def next_frame_s(self) -> float:
        """What it takes to make the next frame heard at the batch sizes now usual, with safety."""
        rows = max(1, round(self.usual_rows))
        stages = self.costs.estimate(Stage.TALKER, rows) + self.costs.estimate(Stage.PREDICTOR, rows)
        return stages + self.costs.estimate(Stage.CODEC, rows, self._least) + self.config.safety_s

    def chunk_frames(self, utterance: Utterance, now_s: float) -> int:
        """Frames of the next codec chunk: the most the listener's buffer leaves time to make, the least when it is short."""
        if not utterance.has_sounded:
            return max(self.config.first_frames, self._least)
        sizes = [size for size in self.config.chunk_frames if size >= self._least]
        if not utterance.live:
            return sizes[-1]
        buffered_s = utterance.playback.buffered_s(now_s) - self.config.safety_s
        rows = max(1, round(self.usual_rows))
        frame_s = self.costs.estimate(Stage.TALKER, rows) + self.costs.estimate(Stage.PREDICTOR, rows)
        best = sizes[0]
        for size in sizes[1:]:
            missing = max(0, size - utterance.undecoded)
            # Half the buffer: the other half is for the neighbours' launches and what the estimate gets wrong.
            if missing * frame_s + self.costs.estimate(Stage.CODEC, rows, size) <= buffered_s / 2:
                best = size
        return best

    def _chunk_size(self, frames: int) -> int:
        """The largest chunk size that `frames` fill; a remainder is decoded in the smallest pieces that exist or as it is."""
        return max((size for size in self.config.chunk_frames if size <= frames), default=frames)

    def _needed_s(self, u: Utterance, chunk: int) -> float:
        rows = max(1, round(self.usual_rows))
        missing = 0 if u.speech_ended else max(0, chunk - u.undecoded)
        frame_s = self.costs.estimate(Stage.TALKER, rows) + self.costs.estimate(Stage.PREDICTOR, rows)
        prompt_s = u.prefill_left * self.costs.estimate(Stage.PREFILL, 1)
        return prompt_s + missing * frame_s + self.costs.estimate(Stage.CODEC, rows, chunk)

    def _anchor(self, work: list[ReadyWork]) -> ReadyWork | None:
        late = [item for item in work if item.utterance.has_sounded and item.slack <= 0]
        if late:
            return min(late, key=lambda item: item.dry_at)
        silent = [item for item in work if not item.utterance.has_sounded]
        if silent:
            return min(silent, key=lambda item: (not item.utterance.live, item.utterance.arrived_s, -item.stage))
        near = [item for item in work if item.slack < self.config.ahead_s]
        if near:
            return min(near, key=lambda item: item.slack)
        return next((item for item in work if not item.utterance.live), None)

    def _launch(self, anchor: ReadyWork, work: list[ReadyWork]) -> Launch:
        """Fill the anchor's launch with rows ready for the same work, in order of need, up to what the anchor can spare."""
        stage, frames = anchor.stage, anchor.frames
        others = [item for item in work if item is not anchor and self._joins(item, stage, frames)]
        others.sort(key=lambda item: (item.utterance.has_sounded, item.slack if item.utterance.has_sounded else item.utterance.arrived_s))
        rows = [anchor.utterance, *(item.utterance for item in others)][: self._room(anchor, 1 + len(others))]
        if stage is not Stage.PREFILL:
            self.usual_rows += 0.05 * (len(rows) - self.usual_rows)
        return Launch(stage, rows, frames)

    def _joins(self, item: ReadyWork, stage: Stage, frames: int) -> bool:
        u = item.utterance
        if u.has_sounded and item.slack >= self.config.ahead_s and u.live:
            return False
        if stage is Stage.CODEC:
            return item.stage is Stage.CODEC and u.undecoded >= frames
        if stage is Stage.PREFILL:
            return False
        return u.predictor_ready if stage is Stage.PREDICTOR else u.talker_ready

    def _room(self, anchor: ReadyWork, rows: int) -> int:
        """Of the buckets that cost the anchor no more than it can spare, and never less than a second row's worth, the one in which
        each of `rows` costs least: half a bucket of padding may cost more than a second launch. Where that is even, the larger one:
        it may only be so because it was never measured."""
        alone = self.costs.estimate(anchor.stage, 1, anchor.frames)
        spare = max(anchor.slack if anchor.utterance.has_sounded else 0.0, 2 * alone)
        best, least_s = 1, alone
        for size in self.config.buckets:
            cost_s = self.costs.estimate(anchor.stage, size, anchor.frames)
            if cost_s - alone <= spare and cost_s / min(size, rows) <= least_s:
                best, least_s = size, cost_s / min(size, rows)
        return best
