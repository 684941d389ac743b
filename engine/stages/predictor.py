"""Predictor stage: completes the frame of each row and sums its embeddings for the next Talker step."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.slots import SlotTable
from engine.stages import sampler
from engine.stages.talker import Force, Tap


class PredictorStage:
    def __init__(self, checkpoint: Checkpoint, slots: SlotTable, most_rows: int) -> None:
        self.predictor = checkpoint.predictor
        self.embedding = checkpoint.talker.model.codec_embedding
        self.slots = slots
        self.tap: Tap | None = None
        self.force: Force | None = None
        self.predictor.prepare(most_rows)

    @torch.inference_mode()
    def launch(self, rows: list[int], live_rows: int) -> None:
        """Draw groups 1.. of the frame whose codebook-0 token waits in each slot of `rows`."""
        s = self.slots
        index = torch.tensor(rows)
        frames = [max(0, s.steps[slot] - 1) for slot in rows]
        numbers = sampler.uniform([s.seed[slot] for slot in rows], frames, s.codes.shape[-1])
        temperature, top_k, top_p, greedy = s.temperature[index, 1], s.top_k[index, 1], s.top_p[index, 1], s.greedy[index, 1]
        all_greedy = bool(greedy.all())

        def draw(group: int, logits: Tensor) -> Tensor:
            logits = logits.float()
            scores = logits
            if not all_greedy:
                scores = torch.where(greedy[:, None], logits, sampler.warp(logits, temperature, top_k, top_p))
            if self.tap is not None:
                self.tap("predictor_logits", rows[:live_rows], logits[:live_rows])
                self.tap("predictor_scores", rows[:live_rows], scores[:live_rows])
            token = sampler.draw(scores, numbers[:, group], greedy)
            return token if self.force is None else self.force(group, rows, token)

        hidden, first = s.hidden[index], self.embedding(s.token[index])
        if self.predictor.frame_kernel is not None and self.tap is None and self.force is None:
            tokens, total = self.predictor.frame(hidden, first, (temperature, top_k, top_p, greedy, numbers))
        else:
            tokens, total = self.predictor(hidden, first, draw)
        codes = torch.cat((s.token[index, None], tokens), 1)
        s.codes[index, torch.tensor(frames)] = codes
        s.frame_sum[index] = total
        if self.tap is not None:
            self.tap("predictor_input", rows[:live_rows], torch.stack((hidden, first), 1)[:live_rows])
            self.tap("codes", rows[:live_rows], codes[:live_rows])
