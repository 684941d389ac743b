"""The Code Predictor on a GPU: the rest of the frame for each slot of a launch, in sixteen passes of one launch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.gpu.stack import Stack
from engine.gpu.state import DeviceSlots
from engine.kernels.gpu.linear import linear, norm_linear
from engine.kernels.gpu.sample import frame_end, predictor_sample
from engine.model.checkpoint import Checkpoint


class GpuPredictor:
    """`most_rows` is the largest launch."""

    def __init__(self, checkpoint: Checkpoint, slots: DeviceSlots, most_rows: int) -> None:
        predictor, talker = checkpoint.predictor, checkpoint.talker
        self.config = checkpoint.config.predictor
        self.slots = slots
        body, groups = self.config.body, self.config.groups
        self.stack = Stack(body, predictor.model.layers, groups)
        self.norm = predictor.model.norm.weight.detach()
        self.heads = [head.weight.detach() for head in predictor.lm_head if isinstance(head, nn.Linear)]
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
        shape = (body.layers, most_rows, body.kv_heads, groups, body.head_dim)
        self.keys = torch.zeros(shape, dtype=self.table.dtype, device=slots.device)
        self.values = torch.zeros(shape, dtype=self.table.dtype, device=slots.device)
        self.places = torch.arange(most_rows, dtype=torch.int32, device=slots.device)
        self.positions = torch.arange(groups, dtype=torch.int32, device=slots.device)[:, None].repeat(1, most_rows)

    def _project(self, x: Tensor) -> Tensor:
        p = self.projection
        return linear(x, p.weight.detach(), p.bias.detach()) if isinstance(p, nn.Linear) else x

    def frame(self, rows: Tensor) -> None:
        """Slots [R] int32, each with its codebook-0 token and hidden state: draws groups 1.. and sums the frame's embeddings."""
        s, count = self.slots, rows.shape[0]
        index = rows.long()
        # Both first positions at once; their rows lie one position after the other.
        first = self.inputs[0][s.token[index].long()]
        x = torch.cat((self._project(s.hidden[index]), first))
        places = self.places[:count]
        both = self._pass(x, torch.cat((places, places)), self.positions[:2, :count].flatten(), one_row_a_slot=False)
        x = both[count:]
        for group in range(1, self.config.groups):
            logits = norm_linear(x, self.norm, self.config.body.eps, self.heads[group - 1])
            last = group == self.config.groups - 1
            following = None if last else torch.empty_like(x)
            self.draw(logits, rows, group, None if last else self.inputs[group], following)
            if following is not None:
                x = self._pass(following, places, self.positions[group + 1, :count], one_row_a_slot=True)
        frame_end(rows, s.codes, s.steps, self.table, self.offsets, s.frame_sum)

    def draw(self, logits: Tensor, rows: Tensor, group: int, table: Tensor | None, following: Tensor | None) -> None:
        """Logits [R, codebook] -> the group's token into the slots' frames, and its row of `table` into `following` [R, width]."""
        s = self.slots
        predictor_sample(logits, rows, group, self.config.groups, s.seed, s.steps, s.sampling, s.codes, table, following)

    def _pass(self, x: Tensor, places: Tensor, positions: Tensor, *, one_row_a_slot: bool) -> Tensor:
        return self.stack.run(x, places, positions, self.keys, self.values, one_row_a_slot=one_row_a_slot)
