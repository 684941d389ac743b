"""The Code Predictor: from a Talker hidden state and codebook-0 token, the other tokens of the frame, one small transformer step each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.native import FrameKernel, StackKernel, loaded
from engine.model.config import PredictorConfig
from engine.model.layers import Attend, Layer, Norm, rope

Draw = Callable[[int, Tensor], Tensor]
"""(group 1.., logits [B, codebook]) -> tokens [B]."""


class PredictorBody(nn.Module):
    def __init__(self, config: PredictorConfig, talker_hidden: int) -> None:
        super().__init__()
        self.codec_embedding = nn.ModuleList(nn.Embedding(config.vocab, talker_hidden) for _ in range(config.groups - 1))
        self.layers = nn.ModuleList(Layer(config.body) for _ in range(config.body.layers))
        self.norm = Norm(config.body.hidden, config.body.eps)


class CodePredictor(nn.Module):
    """Parameter names are the checkpoint's, below `talker.code_predictor.`

    Where predictor and Talker have one width the checkpoint has no projection (reference, section 3)."""

    def __init__(self, config: PredictorConfig, talker_hidden: int) -> None:
        super().__init__()
        self.config = config
        self.model = PredictorBody(config, talker_hidden)
        self.lm_head = nn.ModuleList(nn.Linear(config.body.hidden, config.vocab, bias=False) for _ in range(config.groups - 1))
        self.small_to_mtp_projection = nn.Linear(talker_hidden, config.body.hidden) if talker_hidden != config.body.hidden else nn.Identity()
        self.cos: Tensor
        self.sin: Tensor
        self.keys: Tensor
        self.values: Tensor
        self.kernel: StackKernel | None = None
        self.frame_kernel: FrameKernel | None = None
        self.watch: Callable[[Tensor], None] | None = None
        """Sees the input of each layer and the final hidden states of every step: conform listens here."""

    def prepare(self, rows: int) -> None:
        """Rotary tables, the scratch cache [layers, rows, kv_heads, groups, head_dim] of one launch (a frame's cache never outlives
        it), and the kernels where there are any."""
        body, weight = self.config.body, self.model.norm.weight
        self.cos, self.sin = rope(torch.arange(self.config.groups, device=weight.device), body.head_dim, body.rope_theta, weight.dtype)
        shape = (body.layers, rows, body.kv_heads, self.config.groups, body.head_dim)
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.kernel = self.frame_kernel = None
        if lib := loaded(weight):
            self.kernel = StackKernel(lib, body, list(self.model.layers), self.model.norm)
            projection = self.small_to_mtp_projection
            projected = (projection.weight, projection.bias) if isinstance(projection, nn.Linear) else None
            heads, tables = ([part.get_parameter("weight") for part in parts] for parts in (self.lm_head, self.model.codec_embedding))
            self.frame_kernel = FrameKernel(self.kernel, projected, heads, tables)

    def _attend(self, layer: int, rows: int, start: int, count: int) -> Attend:
        """Rows in lockstep: `count` positions from `start` each, q laid out row after row."""
        keys, values = self.keys[layer, :rows], self.values[layer, :rows]
        end = start + count

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads, head_dim = q.shape[1:]
            kv_heads = k.shape[1]
            keys[:, :, start:end] = k.view(rows, count, kv_heads, head_dim).transpose(1, 2)
            values[:, :, start:end] = v.view(rows, count, kv_heads, head_dim).transpose(1, 2)
            if count == 1:
                scores = torch.matmul(q.view(rows, kv_heads, heads // kv_heads, head_dim), keys[:, :, :end].transpose(2, 3))
                return torch.matmul(scores.softmax(-1), values[:, :, :end]).view(rows, heads * head_dim)
            mixed = F.scaled_dot_product_attention(
                q.view(rows, count, heads, head_dim).transpose(1, 2), keys[:, :, :end], values[:, :, :end], is_causal=True, scale=1.0, enable_gqa=True
            )
            return mixed.transpose(1, 2).reshape(rows * count, heads * head_dim)

        return run

    def _step(self, x: Tensor, rows: int, start: int, count: int) -> Tensor:
        """Projected inputs [rows * count, width] at positions start.. -> final hidden of the last position, [rows, width]."""
        if self.kernel is not None:
            places = [row for row in range(rows) for _ in range(count)], [start + step for step in range(count)] * rows
            return self.kernel.run(x, self.cos, self.sin, places, self.keys, self.values, self.watch).view(rows, count, -1)[:, -1]
        cos, sin = self.cos[start : start + count], self.sin[start : start + count]
        if count > 1:
            cos, sin = cos.repeat(rows, 1, 1), sin.repeat(rows, 1, 1)
        watch = self.watch or (lambda _: None)
        for number, layer in enumerate(self.model.layers):
            watch(x)
            x = layer(x, cos, sin, self._attend(number, rows, start, count))
        hidden: Tensor = self.model.norm(x)
        watch(hidden)
        return hidden.view(rows, count, -1)[:, -1]

    def forward(self, hidden: Tensor, first: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Talker hidden states [B, talker width] and the codebook-0 token's Talker embedding, [B, talker width]
        -> tokens of groups 1.. [B, groups - 1] and the sum of their embeddings [B, talker width]."""
        rows = hidden.shape[0]
        x = self.small_to_mtp_projection(torch.stack((hidden, first), 1).flatten(0, 1))
        state = self._step(x, rows, 0, 2)
        tokens = []
        total = first
        for group in range(1, self.config.groups):
            token = draw(group, self.lm_head[group - 1](state))
            tokens.append(token)
            embedding = self.model.codec_embedding[group - 1](token)
            total = total + embedding
            if group < self.config.groups - 1:
                state = self._step(self.small_to_mtp_projection(embedding), rows, group + 1, 1)
        return torch.stack(tokens, 1), total

    def frame(self, hidden: Tensor, first: Tensor, sampling: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """As `forward` with the sampler's draws, in one kernel call: sampling is temperature, top_k, top_p, greedy [B] and the
        uniform numbers [B, groups]."""
        assert self.frame_kernel is not None
        return self.frame_kernel.frame(hidden, first, (self.cos, self.sin, self.keys, self.values), sampling)
