"""The Talker on a GPU: one step for each slot of a launch, and rows of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.gpu.stack import LayerWeights, Stack
from engine.gpu.state import DeviceSlots
from engine.kernels.gpu.attention import attention, decode_attention, rope_write
from engine.kernels.gpu.linear import linear
from engine.kernels.gpu.norm import rms_norm
from engine.kernels.gpu.sample import talker_input, talker_sample
from engine.model.checkpoint import Checkpoint
from engine.stages.talker import MIN_TOKENS

# Text embeddings projected at once, when the table is made.
TABLE_ROWS = 8192


class GpuTalker:
    def __init__(self, checkpoint: Checkpoint, slots: DeviceSlots) -> None:
        talker = checkpoint.talker
        self.config = checkpoint.config.talker
        self.codebook = checkpoint.config.predictor.vocab
        self.slots = slots
        self.stack = Stack(self.config.body, talker.model.layers, slots.positions)
        self.norm = talker.model.norm.weight.detach()
        self.head = talker.codec_head.weight.detach()
        # The projection of every text token: one row is read where a row of two matrices would be multiplied.
        self.text_table = torch.cat([talker.text(ids) for ids in torch.split(torch.arange(self.config.text_vocab, device=slots.device), TABLE_ROWS)])

    def step(self, rows: Tensor) -> Tensor:
        """Slots [R] int32 -> codebook-0 tokens drawn [R] int32: the codebook's size for end of speech, -1 where the row has gone wrong."""
        s = self.slots
        count = rows.shape[0]
        x = torch.empty(count, self.config.body.hidden, dtype=s.hidden.dtype, device=s.device)
        positions = torch.empty(count, dtype=torch.int32, device=s.device)
        talker_input(rows, s.steps, s.prompt, s.text, s.frame_sum, self.text_table, x, positions)

        def attend(number: int, w: LayerWeights, qkv: Tensor, undivided: Tensor | None) -> Tensor:
            cos, sin, scale = self.stack.cos, self.stack.sin, self.stack.scale
            eps, keys, values = self.config.body.eps, s.keys[number], s.values[number]
            return decode_attention(qkv, w.q_norm, w.k_norm, eps, cos, sin, rows, positions, keys, values, scale, undivided)

        x = self.stack.run(x, attend)
        hidden = rms_norm(x, self.norm, self.config.body.eps)
        s.hidden.index_copy_(0, rows.long(), hidden)
        return self.draw(linear(hidden, self.head, None), rows)

    def draw(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Logits [R, vocab] -> tokens [R], written to the slots as well."""
        s = self.slots
        drawn = torch.empty(rows.shape[0], dtype=torch.int32, device=s.device)
        talker_sample(
            logits,
            rows,
            self.codebook,
            self.config.eos,
            self.config.groups,
            MIN_TOKENS,
            s.seed,
            s.steps,
            s.sampling,
            s.may_end,
            s.seen,
            s.token,
            s.codes,
            drawn,
        )
        return drawn

    def prefill(self, x: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Prompt rows x [R, hidden] at `positions` [R] of slots `rows` [R]: only their keys and values are wanted."""

        def attend(number: int, w: LayerWeights, qkv: Tensor, undivided: Tensor | None) -> Tensor:
            cos, sin, scale = self.stack.cos, self.stack.sin, self.stack.scale
            keys, values = self.slots.keys[number], self.slots.values[number]
            q = rope_write(qkv, w.q_norm, w.k_norm, self.config.body.eps, cos, sin, rows, positions, keys, values, scale, undivided)
            return attention(q, rows, positions, keys, values, None)

        self.stack.run(x, attend)
