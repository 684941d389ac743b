"""The Code Predictor on a GPU: the rest of the frame for each slot of a launch, in sixteen passes of one launch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.gpu.stack import LayerWeights, Stack, with_norm
from engine.gpu.state import DeviceSlots
from engine.kernels.gpu import frame_pass, power_of_two
from engine.kernels.gpu.frame_attention import frame_attention
from engine.kernels.gpu.linear import linear, norm_linear
from engine.kernels.gpu.sample import frame_end, predictor_input, predictor_sample
from engine.model.checkpoint import Checkpoint


class GpuPredictor:
    """`most_rows` is the largest launch."""

    def __init__(self, checkpoint: Checkpoint, slots: DeviceSlots, most_rows: int) -> None:
        predictor, talker = checkpoint.predictor, checkpoint.talker
        self.config = checkpoint.config.predictor
        self.slots = slots
        body, groups = self.config.body, self.config.groups
        self.stack = Stack(body, predictor.model.layers, groups)
        norm = predictor.model.norm.weight.detach()
        self.heads = [with_norm(head.weight.detach(), norm) for head in predictor.lm_head if isinstance(head, nn.Linear)]
        tables = [
            talker.model.codec_embedding.weight.detach(),
            *(table.get_parameter("weight").detach() for table in predictor.model.codec_embedding),
        ]
        self.table = torch.cat(tables)
        offsets = torch.tensor([0, *(len(table) for table in tables[:-1])]).cumsum(0)
        self.offsets = offsets.to(torch.int32).to(slots.device)
        self.projection = predictor.small_to_mtp_projection
        # Where the Predictor is narrower than the Talker, each embedding is projected once here and not once a pass.
        self.inputs = [self._project(table) for table in tables]
        shape = (body.layers, most_rows, body.kv_heads, power_of_two(groups), body.head_dim)
        self.keys = torch.zeros(shape, dtype=self.table.dtype, device=slots.device)
        self.values = torch.zeros(shape, dtype=self.table.dtype, device=slots.device)
        self.whole: frame_pass.FramePass | None = None
        if frame_pass.MOST and frame_pass.usable(self.stack.layers, self.heads, self.keys):
            rest = self.stack.cos, self.stack.sin, self.keys, self.values, body.eps, self.stack.scale
            self.whole = frame_pass.FramePass(self.stack.layers, self.heads, *rest)

    def _project(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        p = self.projection
        return linear(x, p.weight.detach(), p.bias.detach(), out) if isinstance(p, nn.Linear) else x

    def frame(self, rows: Tensor) -> None:
        """Slots [R] int32, each with its codebook-0 token and hidden state: draws groups 1.. and sums the frame's embeddings."""
        s, count = self.slots, rows.shape[0]
        # Both first positions at once; their rows lie one position after the other.
        x = torch.empty(2 * count, self.config.body.hidden, dtype=s.hidden.dtype, device=s.device)
        projected = isinstance(self.projection, nn.Linear)
        last = torch.empty(count, s.hidden.shape[1], dtype=s.hidden.dtype, device=s.device) if projected else x[:count]
        predictor_input(rows, s.hidden, s.token, self.inputs[0], last, x[count:])
        self._project(last, x[:count])
        position = 0
        for group in range(1, self.config.groups):
            logits = self._logits(x, position, group)
            final = group == self.config.groups - 1
            following = None if final else torch.empty(count, self.config.body.hidden, dtype=x.dtype, device=s.device)
            self.draw(logits, rows, group, None if final else self.inputs[group], following)
            if following is not None:
                x, position = following, group + 1
        frame_end(rows, s.codes, s.steps, self.table, self.offsets, s.frame_sum)

    def draw(self, logits: Tensor, rows: Tensor, group: int, table: Tensor | None, following: Tensor | None) -> None:
        """Logits [R, codebook] -> the group's token into the slots' frames, and its row of `table` into `following` [R, width]."""
        s = self.slots
        early = self._whole(len(rows)) is not None
        predictor_sample(logits, rows, group, self.config.groups, s.seed, s.steps, s.sampling, s.codes, table, following, early)

    def _whole(self, rows: int) -> frame_pass.FramePass | None:
        return self.whole if rows <= frame_pass.MOST else None

    def _logits(self, x: Tensor, position: int, group: int) -> Tensor:
        """Of the group behind rows x as `_pass` takes them."""
        whole = self._whole(len(x) // 2 if position == 0 else len(x))
        if whole is not None:
            return whole.run(x, group - 1, position)
        return norm_linear(self._pass(x, position), self.config.body.eps, self.heads[group - 1])

    def _pass(self, x: Tensor, position: int) -> Tensor:
        """Rows x [R, hidden] at a position from 2 on, or [2 R, hidden] at positions 0 and 1 with `position` 0 -> [R, hidden], the latter one's."""

        def attend(number: int, w: LayerWeights, qkv: Tensor, undivided: Tensor | None) -> Tensor:
            cos, sin, scale, eps = self.stack.cos, self.stack.sin, self.stack.scale, self.config.body.eps
            keys, values = self.keys[number], self.values[number]
            return frame_attention(qkv, w.q_norm, w.k_norm, eps, cos, sin, position, keys, values, scale, undivided)

        return self.stack.run(x, attend, wanted=len(x) // 2 if position == 0 else 0)
