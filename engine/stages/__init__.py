"""Stages: the device side of the engine. The loop names slots and counts; what they hold stays behind this class."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from engine.config import EngineConfig
from engine.messages import EngineInfo, Sampling
from engine.model.checkpoint import Checkpoint
from engine.model.prompt import AUTO, Prefix, build_prefix, embed, languages
from engine.model.talker import Span
from engine.prefix import PrefixCache
from engine.scheduler import Stage, StageCosts
from engine.slots import SlotTable
from engine.stages.codec import CodecStage
from engine.stages.predictor import PredictorStage
from engine.stages.talker import TalkerStage


class Stages:
    """Slots, prefixes and the three stages of one checkpoint on one device. Launches pad their rows up to a bucket with the idle slot."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.costs = StageCosts(config.buckets)
        self.slots = SlotTable(checkpoint, config.slots, config.positions)
        self.prefixes = PrefixCache(checkpoint.talker, self.slots.cache, self.slots.idle)
        self.talker_stage = TalkerStage(checkpoint, self.slots)
        self.predictor_stage = PredictorStage(checkpoint, self.slots, config.buckets[-1])
        self.codec_stage = CodecStage(checkpoint, self.slots)

    @property
    def info(self) -> EngineInfo:
        config = self.checkpoint.config
        return EngineInfo(
            model=self.checkpoint.name,
            model_type=config.type,
            voices=list(config.talker.speakers),
            languages=languages(config),
            sample_rate=config.codec.sample_rate,
            samples_per_frame=config.codec.samples_per_frame,
            max_text_chars=self.config.max_text_chars,
            device=str(self.slots.hidden.device),
        )

    @property
    def free_slots(self) -> int:
        return self.slots.free

    def open(self, prefix: Prefix, sampling: Sampling, seed: int, *, may_end: bool, body: Prefix = ()) -> tuple[int, int]:
        """Take a slot and put prefix and body into it, the prefix from the cache; returns the slot and the prompt's rows."""
        slot = self.slots.take()
        rows = self.prefixes.fill(prefix, slot)
        if body:
            with torch.inference_mode():
                self.checkpoint.talker(embed(self.checkpoint.talker, body), [Span(slot, rows, len(body))], self.slots.cache)
            rows += len(body)
        self.slots.prompt[slot] = rows
        self.slots.set_sampling(slot, sampling, seed)
        self.slots.may_end[slot] = may_end
        return slot, rows

    def write_text(self, slot: int, first: int, ids: list[int]) -> None:
        """Text tokens of Talker steps `first`.. of a slot; what lies beyond its positions can never be reached and is dropped."""
        ids = ids[: max(0, self.slots.positions - first)]
        self.slots.text[slot, first : first + len(ids)] = torch.tensor(ids, dtype=torch.int64)

    def allow_end(self, slot: int) -> None:
        """From now on end of speech may be drawn."""
        self.slots.may_end[slot] = True

    def close(self, slot: int) -> None:
        self.slots.give_back(slot)

    def talker(self, rows: list[int]) -> list[int | None]:
        """One step each; the codebook-0 tokens drawn, None for end of speech."""
        padded, live = self._pad(rows)
        tokens = self.talker_stage.launch(padded, live)[:live]
        return [None if token == self.talker_stage.eos else token for token in tokens]

    def predictor(self, rows: list[int]) -> None:
        """Complete the frame of each row."""
        padded, live = self._pad(rows)
        self.predictor_stage.launch(padded, live)

    def codec(self, rows: list[int], first: list[int], frames: int) -> list[bytes]:
        """s16le PCM of `frames` frames of each row, from frame `first[i]`."""
        padded, live = self._pad(rows)
        return self.codec_stage.launch(padded, live, first + [0] * (len(padded) - live), frames)

    def warm_up(self) -> None:
        """Compute the prefixes of every voice with automatic language, and time each stage in the smaller buckets."""
        config, tokenizer = self.checkpoint.config, self.checkpoint.tokenizer
        voices: list[str | None] = list(config.talker.speakers) or [None]
        for voice in voices:
            prefix = build_prefix(config, tokenizer, voice=voice, language=AUTO, instructions="")
            slot, _ = self.open(prefix, Sampling(), 0, may_end=False)
            self.close(slot)
        sizes = [size for size in self.config.buckets if size <= min(4, self.slots.free)]
        for size in sizes:
            rows = [self.open(prefix, Sampling(), row, may_end=False)[0] for row in range(size)]
            for _ in range(3):
                self._timed(Stage.TALKER, size, 1, partial(self.talker, rows))
                self._timed(Stage.PREDICTOR, size, 1, partial(self.predictor, rows))
                for frames in sorted({self.config.first_frames, *self.config.chunk_frames}):
                    self._timed(Stage.CODEC, size, frames, partial(self.codec, rows, [0] * size, frames))
            for slot in rows:
                self.close(slot)

    def _timed(self, stage: Stage, rows: int, frames: int, run: Callable[[], object]) -> None:
        begin_s = time.monotonic()
        run()
        self.costs.record(stage, rows, frames, time.monotonic() - begin_s)

    def _pad(self, rows: list[int]) -> tuple[list[int], int]:
        return rows + [self.slots.idle] * (self.costs.bucket(len(rows)) - len(rows)), len(rows)
