"""Stages: the device side of the engine. The loop names slots and counts; what they hold stays behind this class."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import Sampling
from engine.model.prompt import Prefix, Reference, embed, embed_frames
from engine.model.talker import Span
from engine.prefix import PrefixCache, PrimedCodec
from engine.scheduler import Stage
from engine.slots import SlotTable
from engine.stages.base import BaseStages, Launched
from engine.stages.codec import CodecStage
from engine.stages.pending import Finished
from engine.stages.predictor import PredictorStage
from engine.stages.talker import TalkerStage

__all__ = ["BaseStages", "Stages"]


class Stages(BaseStages):
    """On a CPU: every launch is over when it returns. Launches pad their rows up to a bucket with the idle slot."""

    slots: SlotTable

    def _build(self) -> None:
        self.slots = SlotTable(self.checkpoint, self.config.slots, self.config.positions)
        self.prefixes = PrefixCache(self.slots.cache.keys, self.slots.cache.values)
        self.primed = PrimedCodec(self.checkpoint.codec, self.config.priming_frames)
        self.talker_stage = TalkerStage(self.checkpoint, self.slots)
        self.predictor_stage = PredictorStage(self.checkpoint, self.slots, self.config.buckets[-1])
        self.codec_stage = CodecStage(self.checkpoint, self.slots)

    def launch(self, stage: Stage, slots: list[int], first: list[int], frames: int) -> Launched:
        match stage:
            case Stage.PREFILL:
                return Finished(self.prefill(slots[0]))
            case Stage.TALKER:
                return Finished(self.talker(slots))
            case Stage.PREDICTOR:
                self.predictor(slots)
                return Finished(None)
            case Stage.CODEC:
                return Finished(self.codec(slots, first, frames))

    def talker(self, rows: list[int]) -> list[int | None]:
        """One step each; the codebook-0 tokens drawn, None for end of speech, negative where the row has gone wrong."""
        padded, live = self._pad(rows)
        tokens = self.talker_stage.launch(padded, live)[:live]
        return [None if token == self.talker_stage.eos else token for token in tokens]

    def predictor(self, rows: list[int]) -> None:
        """Complete the frame of each row."""
        padded, live = self._pad(rows)
        self.predictor_stage.launch(padded, live)

    def codec(self, rows: list[int], first: list[int], frames: int) -> list[NDArray[np.int16] | None]:
        """Samples of `frames` frames of each row, from frame `first[i]`; None where one is not a number."""
        padded, live = self._pad(rows)
        return self.codec_stage.launch(padded, live, first + [0] * (len(padded) - live), frames)

    @torch.inference_mode()
    def _compute(self, slot: int, rows: Prefix, start: int) -> None:
        talker = self.checkpoint.talker
        talker(embed(talker, self.checkpoint.predictor, rows), [Span(slot, start, len(rows))], self.slots.cache)

    def _prime(self, slot: int, reference: Reference) -> tuple[list[Callable[[], object]], Callable[[], object]]:
        state, steps = self.primed.after(reference), list[Callable[[], object]]()
        if state is None:
            state, decoding = self.primed.compute(reference, self.slots.codec_state(torch.tensor([slot])))
            steps += decoding

        def go_on() -> None:
            last = torch.tensor(reference.frames[-1:])
            with torch.inference_mode():
                frame_sum = embed_frames(self.checkpoint.talker, self.checkpoint.predictor, last)[0]
            self.slots.begin_after(slot, frame_sum, state)

        return steps, go_on

    def _priming_pieces(self, reference: Reference) -> int:
        return 0 if self.primed.after(reference) is not None else self.primed.pieces(reference)

    def _measure(self, prefix: Prefix) -> None:
        sizes = [size for size in self.config.buckets if size <= min(4, self.slots.free)]
        for size in sizes:
            rows = [self.open(prefix, Sampling(), row, may_end=False)[0] for row in range(size)]
            if size == 1:
                self._timed(Stage.PREFILL, 1, 1, partial(self._compute, rows[0], prefix[: self.config.prefill_rows], 0))
            self._timed(Stage.TALKER, size, 1, partial(self.talker, rows))
            self._timed(Stage.PREDICTOR, size, 1, partial(self.predictor, rows))
            for frames in sorted({self.config.first_frames, self.config.chunk_frames[0], self.config.chunk_frames[-1]}):
                self._timed(Stage.CODEC, size, frames, partial(self.codec, rows, [0] * size, frames))
            for slot in rows:
                self.close(slot)

    def _timed(self, stage: Stage, rows: int, frames: int, run: Callable[[], object]) -> None:
        run()  # the first run of a shape pays for set-up
        begin_s = time.monotonic()
        run()
        self.costs.record(stage, rows, frames, time.monotonic() - begin_s)

    def _pad(self, rows: list[int]) -> tuple[list[int], int]:
        return rows + [self.slots.idle] * (self.costs.bucket(len(rows)) - len(rows)), len(rows)
