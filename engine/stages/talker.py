"""Talker stage: one step for each row. Reads text token and frame sum, writes hidden state and codebook-0 token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.native import HeadKernel, loaded
from engine.model.checkpoint import Checkpoint
from engine.model.talker import Span
from engine.slots import SlotTable
from engine.stages import sampler

MIN_TOKENS = 2
"""End of speech is not drawn before this many tokens (reference, section 8)."""

BROKEN = -1
"""In place of a token: the row's hidden state is not a number."""

Tap = Callable[[str, list[int], Tensor], None]
"""(what, slots, values [rows, ...]): conform listens to the serving path here."""
Force = Callable[[int, list[int], Tensor], Tensor]
"""(group, slots, tokens drawn [rows]) -> tokens to take instead: conform replays recorded draws."""


class TalkerStage:
    def __init__(self, checkpoint: Checkpoint, slots: SlotTable) -> None:
        self.talker = checkpoint.talker
        self.slots = slots
        self.codebook = checkpoint.config.predictor.vocab
        self.eos = checkpoint.config.talker.eos
        self.tap: Tap | None = None
        self.force: Force | None = None
        self.talker.prepare(slots.positions)
        weight = self.talker.codec_head.weight
        lib = loaded(weight)
        self.kernel = HeadKernel(lib, weight, self.codebook, self.eos) if lib else None

    @torch.inference_mode()
    def launch(self, rows: list[int], live_rows: int) -> list[int]:
        """Step the slots `rows` (the first `live_rows` count, the rest pad); returns each row's token, `eos` for end of speech, or BROKEN."""
        s = self.slots
        steps = [s.steps[slot] for slot in rows]
        index = torch.tensor(rows)
        text = s.text[index, torch.tensor(steps)]
        x = s.frame_sum[index] + self.talker.text(text)
        hidden = self.talker(x, [Span(slot, s.prompt[slot] + step) for slot, step in zip(rows, steps, strict=True)], s.cache)
        s.hidden[index] = hidden
        number = sampler.uniform([s.seed[slot] for slot in rows], steps, s.codes.shape[-1])[:, 0]
        if self.kernel is not None and self.tap is None:
            token = self._draw_by_kernel(rows, index, steps, hidden, number)
        else:
            token = self._draw(rows, live_rows, index, steps, x, hidden, number)
        s.token[index] = token.clamp(max=self.codebook - 1)
        s.seen[index, s.token[index]] = True
        for slot in rows[:live_rows]:
            s.steps[slot] += 1
        finite = hidden.isfinite().all(-1).tolist()
        return [BROKEN if not good else self.eos if value == self.codebook else value for value, good in zip(token.tolist(), finite, strict=True)]

    def _draw_by_kernel(self, rows: list[int], index: Tensor, steps: list[int], hidden: Tensor, number: Tensor) -> Tensor:
        s = self.slots
        assert self.kernel is not None
        may_end = s.may_end[index] & torch.tensor([step >= MIN_TOKENS for step in steps])
        sampling = s.temperature[index, 0], s.top_k[index, 0], s.top_p[index, 0], s.greedy[index, 0], number
        token = self.kernel.draw(self.kernel.logits(hidden), s.seen[index], s.penalty[index], may_end, sampling)
        return token if self.force is None else self.force(0, rows, token)

    def _draw(self, rows: list[int], live_rows: int, index: Tensor, steps: list[int], x: Tensor, hidden: Tensor, number: Tensor) -> Tensor:
        s = self.slots
        raw = self.talker.codec_head(hidden).float()
        # Only the codes and end of speech can be drawn; the other control ids are suppressed by not being here.
        codes = sampler.penalize(raw[:, : self.codebook], s.seen[index], s.penalty[index])
        early = torch.tensor([step < MIN_TOKENS for step in steps])
        end = raw[:, self.eos].masked_fill(early | ~s.may_end[index], -torch.inf)
        logits = torch.cat((codes, end[:, None]), -1)
        greedy = s.greedy[index, 0]
        scores = logits
        if not bool(greedy.all()):
            warped = sampler.warp(logits, s.temperature[index, 0], s.top_k[index, 0], s.top_p[index, 0])
            scores = torch.where(greedy[:, None], logits, warped)
        token = sampler.draw(scores, number, greedy)
        if self.force is not None:
            token = self.force(0, rows, token)
        if self.tap is not None:
            for what, values in (("input", x), ("hidden", hidden), ("logits", raw), ("scores", scores), ("token", token)):
                self.tap(what, rows[:live_rows], values[:live_rows])
        return token
