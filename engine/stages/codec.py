"""Codec stage: the next frames of each row become samples."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.checkpoint import Checkpoint
from engine.slots import SlotTable
from engine.stages.talker import Tap


class CodecStage:
    def __init__(self, checkpoint: Checkpoint, slots: SlotTable) -> None:
        self.codec = checkpoint.codec
        self.slots = slots
        self.tap: Tap | None = None
        self.codec.prepare()

    @torch.inference_mode()
    def launch(self, rows: list[int], live_rows: int, first: list[int], frames: int) -> list[NDArray[np.int16] | None]:
        """Decode `frames` frames of each slot, from frame `first[i]` on; returns the samples of the first `live_rows` rows,
        None where one is not a number."""
        s = self.slots
        codes = torch.stack([s.codes[slot, start : start + frames] for slot, start in zip(rows, first, strict=True)])
        if self.codec.kernel is not None:
            samples = self.codec.kernel.decode(codes, rows, s.codec, s.codec_frames)
        else:
            index = torch.tensor(rows)
            state = s.codec_state(index)
            samples = self.codec(codes, state)
            s.keep_codec_state(index, state)
        if self.tap is not None:
            self.tap("wav", rows[:live_rows], samples[:live_rows])
        # Scaled by 32767 so that both ends of [-1, 1] fit.
        samples = samples[:live_rows].float()
        finite = samples.isfinite().all(-1).tolist()
        pcm = (samples * 32767.0).round().to(torch.int16).cpu().numpy()
        return [row if good else None for row, good in zip(pcm, finite, strict=True)]
