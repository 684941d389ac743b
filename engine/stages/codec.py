"""Codec stage: the next frames of each row become samples."""

from __future__ import annotations

import torch

from engine.model.checkpoint import Checkpoint
from engine.slots import SlotTable
from engine.stages.talker import Tap


class CodecStage:
    def __init__(self, checkpoint: Checkpoint, slots: SlotTable) -> None:
        self.codec = checkpoint.codec
        self.slots = slots
        self.tap: Tap | None = None

    @torch.inference_mode()
    def launch(self, rows: list[int], live_rows: int, first: list[int], frames: int) -> list[bytes]:
        """Decode `frames` frames of each slot, from frame `first[i]` on; returns s16le PCM of the first `live_rows` rows."""
        s = self.slots
        index = torch.tensor(rows)
        codes = torch.stack([s.codes[slot, start : start + frames] for slot, start in zip(rows, first, strict=True)])
        state = s.codec_state(index)
        samples = self.codec(codes, state)
        s.keep_codec_state(index, state)
        if self.tap is not None:
            self.tap("wav", rows[:live_rows], samples[:live_rows])
        # Scaled by 32767 so that both ends of [-1, 1] fit.
        pcm = (samples[:live_rows].float() * 32767.0).round().to(torch.int16).cpu().numpy()
        return [row.tobytes() for row in pcm]
